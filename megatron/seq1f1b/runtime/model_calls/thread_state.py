"""What PyTorch keeps for a thread. Greenlets share a thread, so each needs its own state back when it goes on.

Tested in runtime/test_call.py by test_gradients_and_autocast_are_those_of_whoever_runs.
"""

from typing import Any, NamedTuple, Self

import torch


class ThreadState(NamedTuple):
    """Whether gradients are recorded, the types of autocast, and the current stream of a GPU."""

    has_gradients: bool
    casts_on_gpu: bool
    gpu_dtype: torch.dtype
    casts_on_cpu: bool
    cpu_dtype: torch.dtype
    caches_casts: bool
    stream: Any

    @classmethod
    def now(cls) -> Self:
        """The state of the running thread."""
        return cls(
            has_gradients=torch.is_grad_enabled(),
            casts_on_gpu=torch.is_autocast_enabled("cuda"),
            gpu_dtype=torch.get_autocast_dtype("cuda"),
            casts_on_cpu=torch.is_autocast_enabled("cpu"),
            cpu_dtype=torch.get_autocast_dtype("cpu"),
            caches_casts=torch.is_autocast_cache_enabled(),
            stream=torch.cuda.current_stream() if torch.cuda.is_available() else None,
        )

    def make_current(self, instead_of: Self) -> None:
        """Make this the state of the thread, whose state is another one now."""
        if instead_of == self:
            return
        torch.set_grad_enabled(self.has_gradients)
        torch.set_autocast_enabled("cuda", self.casts_on_gpu)
        torch.set_autocast_dtype("cuda", self.gpu_dtype)
        torch.set_autocast_enabled("cpu", self.casts_on_cpu)
        torch.set_autocast_dtype("cpu", self.cpu_dtype)
        torch.set_autocast_cache_enabled(self.caches_casts)
        if instead_of.stream != self.stream:
            # What was begun on one stream is input of what runs on the other from now on.
            self.stream.wait_stream(instead_of.stream)
            torch.cuda.set_stream(self.stream)
