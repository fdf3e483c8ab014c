"""Replacements for torch's GPU functions when the device is the CPU."""

import ctypes
import functools
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_CLEAR_REFS = Path("/proc/self/clear_refs")


def nothing(*args, **kwargs):
    return None


def no(*args, **kwargs):
    return False


def yes(*args, **kwargs):
    return True


class Stream:
    """A stream on which everything is already done: CPU work is finished when the call returns."""

    wait_stream = wait_event = synchronize = __init__ = nothing
    query = yes

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event


class Event:
    """The moment at which it was recorded."""

    wait = synchronize = nothing
    query = yes

    def __init__(self, *args, **kwargs):
        self._seconds = 0.0

    def record(self, stream=None):
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3


def current_device():
    return torch.device("cpu")  # not an index: callers pass it on as `device=`


def resident_bytes(device=None) -> int:
    """Memory of this process that is in RAM now."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # macOS
        return peak_resident_bytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_resident_bytes(device=None) -> int:
    """The most memory that this process has had in RAM."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The kernel updates the peak only now and then.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, resident_bytes())


def forget_peak(device=None) -> None:
    """Count the peak from now on (Linux). Freed pages go back to the system first, else reusing them would not
    count."""
    if _CLEAR_REFS.exists():
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text("5")  # see proc(5)


def memory_stats(device=None) -> dict[str, int]:
    found = {"allocation.all.current": 0}
    for kind in ("allocated_bytes.all", "reserved_bytes.all"):
        found |= {f"{kind}.current": resident_bytes(), f"{kind}.peak": peak_resident_bytes()}
    return found


def get_rng_state(*args, **kwargs):
    return torch.get_rng_state()


def set_rng_state(new_state, *args, **kwargs):
    torch.set_rng_state(new_state)


def made_on_cpu(factory):
    """`factory` (`torch.zeros`, say), with a CUDA `device` read as the CPU, and nothing pinned for it."""

    @functools.wraps(factory)
    def create(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs["device"] = "cpu"
        if kwargs.get("out") is not None:  # it has a device: in a rehearsal, that of tensors without values
            kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def stay(tensor, *args, **kwargs):
    """`Tensor.cuda`: the tensor is where it belongs."""
    return tensor


def cuda_type_name(type_method, tensor, dtype=None, *args, **kwargs):
    """`Tensor.type` with the names that upstream's checks expect, also for tensors without values."""
    if dtype is None:
        return f"torch.cuda.{type_method(tensor).rpartition('.')[2]}"
    return type_method(tensor, dtype, *args, **kwargs)


def on_one_device(gloo: type[dist.ProcessGroupGloo]) -> type[dist.ProcessGroupGloo]:
    """The class of gloo's groups, which share the devices of a process. A device is a polling thread, and torch makes
    one for each group. Megatron has some thirty groups a rank; 60 take a fifth of a core while nothing happens.

    A group's collectives run in one thread. In the two threads that torch uses, they corrupt the heap if they end at
    the same time: both write the name of the last one (`lastCompletedWorkName` in ProcessGroupGloo.cpp of PyTorch
    2.13).
    """

    class OnOneDevice(gloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._timeout = timeout
            options._devices = _devices_of(os.getpid())
            options._threads = 1
            super().__init__(store, rank, size, options)

    return OnOneDevice


@functools.cache
def _devices_of(process: int) -> list:
    """The devices that torch would make for a group: one for each interface that GLOO_SOCKET_IFNAME names. Their
    threads do not survive a fork, so each `process` has its own."""
    make = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interfaces:
        return [make.create_default_device()]
    return [make.create_device(interface=name) for name in interfaces.split(",")]
