"""pretrain_gpt.py with one fault: FAULT is "what where iteration rank".

What: `kill`, `interrupt` and `stop` this process, where `stop` goes on after a while, `fill` the file system of --save,
`fail` with an exception, or let `memory` run out, also but for the `stack` of a thread. Where: in `forward`,
`backward`, `copy` (of activations, to the host), `optimizer` (its step) or `save`. The rank may be `both`. torchrun's
restarts have no fault.
"""

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import torch

import pretrain_gpt

# isort: split
# Megatron after what installs our schedules and moves it to the CPU.
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training import checkpointing, get_args

from megatron.seq1f1b.model.memory import copies
from megatron.seq1f1b.runtime import interpreter


def main() -> None:
    fault = os.environ.get("FAULT", "").split()
    if fault and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and fault[3] in (os.environ["RANK"], "both"):
        what, where, iteration, _ = fault
        for owner, name in places()[where]:
            setattr(owner, name, before(getattr(owner, name), what, int(iteration)))
    pretrain_gpt.main(pretrain_gpt.gpt_config_from_args, {})


def places() -> dict[str, list[tuple[object, str]]]:
    """The functions before which a fault happens."""
    return {
        "forward": [(pretrain_gpt, "forward_step")],
        "backward": [(interpreter, "backward_step")],
        "copy": [(copies, "copy_pairs")],
        "save": [(checkpointing.dist_checkpointing, "save")],
        "optimizer": [(kind, "step") for kind in subclasses(MegatronOptimizer) if "step" in vars(kind)],
    }


def subclasses(kind: type) -> list[type]:
    return [each for direct in kind.__subclasses__() for each in (direct, *subclasses(direct))]


def before(function: Callable, what: str, iteration: int) -> Callable:
    """`function`, before whose first call in an iteration the fault happens."""
    happened = []

    @wraps(function)
    def with_fault(*args, **kwargs):
        if get_args().curr_iteration + 1 == iteration and not happened:
            happened.append(what)
            FAULTS[what]()
        return function(*args, **kwargs)

    return with_fault


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in programs that a shell runs in the background
    os.kill(os.getpid(), signal.SIGINT)


def stop() -> None:
    subprocess.Popen([sys.executable, "-S", "-c", f"import os, time; time.sleep(2); os.kill({os.getpid()}, 18)"])
    os.kill(os.getpid(), signal.SIGSTOP)


def fill() -> None:
    folder = Path(get_args().save)
    with open(folder / "filler", "wb") as file:
        file.write(bytes(shutil.disk_usage(folder).free - 100_000))


def fail() -> None:
    raise OSError("the bus is gone")


def memory(left: int = 0) -> None:
    """All memory of the process is in use, but for so many bytes."""
    status = Path("/proc/self/status").read_text()
    (used,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + left, resource.RLIM_INFINITY))
    torch.empty(1 << 30, dtype=torch.uint8)


def stack() -> None:
    """A thread gets its stack, and no memory for its first lines."""
    library = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t()
    library.pthread_getattr_default_np(attributes)
    library.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    memory(left=size.value + 4096)


FAULTS = {
    "kill": kill,
    "interrupt": interrupt,
    "stop": stop,
    "fill": fill,
    "fail": fail,
    "memory": memory,
    "stack": stack,
}

if __name__ == "__main__":
    main()
