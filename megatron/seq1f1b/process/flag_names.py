"""How flags are spelled."""


def flag_of(name: str) -> str:
    """The flag whose value has this name after parsing: `--num-layers` for `num_layers`."""
    return f"--{name.replace('_', '-')}"
