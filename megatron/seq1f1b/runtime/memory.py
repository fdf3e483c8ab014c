"""How much memory a step takes at its peak, beyond what is there when it starts."""

import ctypes
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Counts from its creation: activations, caches, messages and workspace, but not weights or optimizer state.

    On a GPU this is the count of PyTorch's allocator. On a CPU, which has none, it is the resident set of the process
    (Linux); freed pages are returned first, so that they are not part of the baseline.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._baseline = torch.cuda.memory_allocated(device)
        else:
            ctypes.CDLL(None).malloc_trim(0)
            (_PROCESS / "clear_refs").write_text("5")  # forget the peak so far
            self._baseline = _status_bytes("VmRSS")

    def peak(self) -> int:
        """Bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._baseline
        return _status_bytes("VmHWM") - self._baseline


def _status_bytes(field: str) -> int:
    for line in (_PROCESS / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    raise OSError(f"/proc/self/status has no {field}; peak memory on a CPU is read from Linux")
