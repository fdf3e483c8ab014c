"""The variables by which a launcher tells a process its place in a job; a wrong one is a sentence before any work."""

import re
import socket
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

# The least and the largest value of each.
_LIMITS: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        "WORLD_SIZE": (1, None),
        "RANK": (0, None),
        "LOCAL_WORLD_SIZE": (1, None),
        "LOCAL_RANK": (0, None),
        "MASTER_PORT": (1, 2**16 - 1),
    }
)
_SETS_BOTH = "what starts the ranks, such as torchrun, sets both"
_PATIENCE = 5.0  # seconds in which the name of its own host must be known to rank 0
# Seconds in which other ranks must know it. They may start before it does, and its name may be new then.
_PATIENCE_OF_OTHERS = 60.0
_POLL = 0.5


def check_job_variables(environ: Mapping[str, str], argv: Sequence[str]) -> None:
    """Raise ValueError for a variable of the job that is no number or out of range, or that contradicts another.
    `argv` are the words of the command line."""
    numbers: dict[str, int] = {}
    for name, (least, most) in _LIMITS.items():
        text = environ.get(name)
        if text is None:
            continue
        is_number = re.fullmatch("[0-9]{1,9}", text) is not None
        if not is_number or int(text) < least or (most is not None and int(text) > most):
            expected = f"from {least} on" if most is None else f"from {least} to {most}"
            raise ValueError(
                f"{name}={text} in the environment is not a whole number {expected}; what starts the ranks, such as "
                "torchrun, sets it; unset it for a single rank"
            )
        numbers[name] = int(text)
    bounds = {"RANK": ("WORLD_SIZE", numbers.get("WORLD_SIZE", 1))}
    if "LOCAL_WORLD_SIZE" in numbers:
        bounds["LOCAL_RANK"] = ("LOCAL_WORLD_SIZE", numbers["LOCAL_WORLD_SIZE"])
    for name, (bound, size) in bounds.items():
        if numbers.get(name, 0) >= size:
            raise ValueError(f"{name}={numbers[name]} in the environment must be below {bound}={size}; {_SETS_BOTH}")
    plays_all_ranks = "--dry-run" in argv or "--fake-process-group" in argv
    is_named = "RANK" in numbers or plays_all_ranks
    if numbers.get("WORLD_SIZE", 1) > 1 and not is_named:  # Megatron would take every process for rank 0
        raise ValueError(f"WORLD_SIZE={numbers['WORLD_SIZE']} in the environment, but RANK is not set; {_SETS_BOTH}")
    if not plays_all_ranks and environ.get("MASTER_ADDR"):
        is_first = numbers.get("RANK", 0) == 0
        _check_host(environ["MASTER_ADDR"], _PATIENCE if is_first else _PATIENCE_OF_OTHERS)


def check_meeting_place(environ: Mapping[str, str]) -> None:
    """Raise ValueError if the environment does not say where the ranks meet, as if none had started them."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start the script by torchrun "
            "--standalone --nproc-per-node N, with N ranks on this host, or set both"
        )


def _check_host(name: str, patience: float) -> None:
    """Raise ValueError if MASTER_ADDR is a name that this rank cannot look up within `patience` seconds: libraries
    would try for minutes."""
    end = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except (OSError, UnicodeError) as error:  # UnicodeError is that of a name of more than 63 letters
            if time.monotonic() > end:
                words = error.strerror if isinstance(error, OSError) else "no name of a host"
                raise ValueError(
                    f"MASTER_ADDR={name} in the environment cannot be looked up ({words}); give the name or the "
                    "address of the host of rank 0, localhost for a job on one host"
                ) from None
        time.sleep(_POLL)
