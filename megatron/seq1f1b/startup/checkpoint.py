"""Whether the checkpoint that a run starts from is complete and of its model, checked before any work is done."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from .ending import wants_tracebacks

_TRACKER = "latest_checkpointed_iteration.txt"
# Settings that Megatron does not change between parsing and saving.
_OF_THE_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "multi_latent_attention",
    "num_experts",
    "swiglu",
)


def check_checkpoint(args: Namespace) -> None:
    """Raise ValueError for a checkpoint that `--load` names and that cannot be loaded, as far as files can show it.

    Without one, training starts from random weights, unless `--exit-on-missing-checkpoint` is given.
    """
    folder = Path(args.load)
    iteration = latest_iteration(folder) if args.ckpt_step is None else args.ckpt_step
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            raise ValueError(f"--load {folder} holds no checkpoint (no {_TRACKER}), and --exit-on-missing-checkpoint")
        return
    saved = folder / (iteration if iteration == "release" else f"iter_{int(iteration):07d}")
    if not saved.is_dir():
        raise ValueError(
            f"--load {folder}: there is no {saved.name}, which {_TRACKER} names; put the number of a whole checkpoint "
            "into that file"
        )
    if not (saved / ".metadata").exists() and not (saved / "metadata.json").exists():
        return  # not of Megatron's default format, whose files are looked at here
    for name in ("metadata.json", ".metadata"):
        if not (saved / name).is_file():
            raise ValueError(f"--load {folder}: {saved.name} has no file {name}; {_other(folder, saved)}")
    _check_sizes(folder, saved)
    is_translated = getattr(args, "hybrid_layer_pattern", None) is not None  # a GPT's becomes a hybrid model's
    if not getattr(args, "finetune", False) and not is_translated:
        _check_model(folder, saved, args)


def latest_iteration(folder: Path) -> str | None:
    """The iteration in Megatron's tracker file, a number or `release`; None if there is no file."""
    try:
        text = (folder / _TRACKER).read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, NotADirectoryError) as error:
        raise ValueError(f"{folder / _TRACKER} cannot be read ({error})") from None
    if text != "release" and not text.isdecimal():
        raise ValueError(f"{folder / _TRACKER} holds '{text[:40]}', not the number of an iteration; mend it")
    return text


def _other(folder: Path, saved: Path) -> str:
    """The way out of a broken checkpoint: an earlier one, if there is one."""
    earlier = sorted(path.name for path in folder.glob("iter_*") if path.is_dir() and path.name < saved.name)
    if not earlier:
        return "there is no earlier one; start without --load"
    return f"for an earlier one put {int(earlier[-1].removeprefix('iter_'))} into {_TRACKER}"


def _check_sizes(folder: Path, saved: Path) -> None:
    """Every file must be as long as the parts that the metadata place in it."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        parts = FileSystemReader(saved).read_metadata().storage_data.values()
    except Exception as error:  # whatever unpickling raises
        raise _unreadable(folder, saved, ".metadata", error) from error
    needed: dict[str, int] = {}
    for part in parts:
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sorted(needed.items()):
        path = saved / name
        if not path.is_file():
            raise ValueError(f"--load {folder}: {saved.name} has no file {name}; {_other(folder, saved)}")
        if path.stat().st_size < size:
            raise ValueError(
                f"--load {folder}: {saved.name}/{name} has {path.stat().st_size} bytes of {size}, the checkpoint was "
                f"not saved to its end; {_other(folder, saved)}"
            )


def _check_model(folder: Path, saved: Path, args: Namespace) -> None:
    """The sizes of the saved model must be those of the flags."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    try:
        common: dict[str, Any] = load_common_state_dict(str(saved))
    except Exception as error:  # whatever unpickling raises
        raise _unreadable(folder, saved, "its common state", error) from error
    there = common.get("args")
    if there is None:
        return
    _check_placement(folder, saved, there, args)
    for name in _OF_THE_MODEL:
        if hasattr(there, name) and hasattr(args, name) and getattr(there, name) != getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"--load {folder}: {saved.name} is of another model, with {flag} {getattr(there, name)} instead of "
                f"{getattr(args, name)}; give the flags of that model, or another folder"
            )


def _check_placement(folder: Path, saved: Path, there: Namespace, args: Namespace) -> None:
    """Megatron's usual form of the distributed optimizer's state names ranks, not layers, and would load anywhere."""
    placements = [getattr(each, "pipeline_placement", "looped") for each in (there, args)]
    is_by_ranks = getattr(there, "use_distributed_optimizer", False) and not getattr(
        there, "dist_ckpt_optim_fully_reshardable", False
    )
    if placements[0] != placements[1] and is_by_ranks and not args.no_load_optim:
        raise ValueError(
            f"--load {folder}: the optimizer's state in {saved.name} is by ranks with --pipeline-placement "
            f"{placements[0]}; give that, or --no-load-optim, or save with --dist-ckpt-optim-fully-reshardable"
        )


def _unreadable(folder: Path, saved: Path, name: str, error: Exception) -> ValueError:
    detail = f" ({type(error).__name__}: {error})" if wants_tracebacks() else ""
    return ValueError(f"--load {folder}: {name} of {saved.name} cannot be read{detail}; {_other(folder, saved)}")
