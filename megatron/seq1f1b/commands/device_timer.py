"""The timings behind `seq1f1b profile`: single operations of this rank's device, and what passes between ranks.

Tested in functional_tests/test_benchmarks.py by test_two_ranks_measure_their_device_and_their_link.
"""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..model import link_rate
from ..model.kernels import AttentionRule, KernelChoice, Saved

_REPEATS = 5
_SMALL_KERNELS = 200


class DeviceTimer:
    """Median seconds of operations that all ranks run at once, in bf16 on a GPU and in fp32 on a CPU."""

    def __init__(self) -> None:
        self._is_on_gpu = torch.cuda.is_available()
        self._device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self._is_on_gpu else "cpu")
        dtype = torch.bfloat16 if self._is_on_gpu else torch.float32
        self._type: dict[str, Any] = {"device": self._device, "dtype": dtype}
        # The length of the sequences to time attention with, and the side of matrices.
        self.longest = 8192 if self._is_on_gpu else 2048
        self.name = "one core of this machine"
        self.nearest = "cpu"
        self.sizes: dict[str, float] = {}
        if self._is_on_gpu:
            torch.cuda.set_device(self._device)
            gpu = torch.cuda.get_device_properties(self._device)
            self.name = gpu.name
            self.nearest = "a100-80gb" if "A100" in gpu.name else "h100-80gb"
            self.sizes = {"memory_gib": gpu.total_memory / 2**30, "multiprocessors": gpu.multi_processor_count}
        else:
            torch.set_num_threads(1)
        self.rank = int(os.environ.get("RANK", "0"))
        self.num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.ranks_in_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self.num_ranks > 1:
            dist.init_process_group("nccl" if self._is_on_gpu else "gloo")
            self._node, _ = dist.new_subgroups(self.ranks_in_node)

    def product(self, side: int) -> float:
        """Seconds of a product of two square matrices."""
        left, right = torch.randn(2, side, side, **self._type)
        return self._seconds(lambda: left @ right)

    def attention(self, heads: int, head_dim: int, queries: int, keys: int, backward: bool) -> float:
        """Seconds of attention of the last queries of a causal sequence."""
        query = torch.randn(queries, 1, heads, head_dim, **self._type)
        key, value = torch.randn(2, keys, 1, heads, head_dim, **self._type)
        kernel = KernelChoice().kernel(AttentionRule(head_dim**-0.5), query, value)
        if not backward:
            return self._seconds(lambda: kernel.forward(query, key, value))
        output, saved = kernel.forward(query, key, value)
        return self._seconds(lambda: kernel.backward(output, Saved(query, key, value, output, saved)))

    def small_kernel(self) -> float:
        """Seconds from the start of one small kernel to the start of the next."""
        number = torch.zeros((), **self._type)

        def add() -> None:
            for _ in range(_SMALL_KERNELS):
                number.add_(1)

        return self._seconds(add) / _SMALL_KERNELS

    def move(self, num_bytes: int) -> float:
        """Seconds to read half of so many bytes of the device, and to write as many."""
        source = self._bytes(num_bytes // 2)
        target = torch.empty_like(source)
        return self._seconds(lambda: target.copy_(source))

    def host_rate(self) -> float:
        """Bytes/s to the host, while as many come back."""
        return link_rate(self._device, self._meet)

    def all_reduce(self, num_bytes: int, in_node: bool) -> float:
        """Seconds of an all-reduce among the ranks of each node, or among all ranks."""
        tensor = self._bytes(num_bytes)
        return self._seconds(lambda: dist.all_reduce(tensor, group=self._node if in_node else None))

    def message(self, num_bytes: int, peer: int) -> float:
        """Seconds of a message: half of the time from rank 0 to a peer and back."""
        tensor = self._bytes(num_bytes)

        def there_and_back() -> None:
            for source, target in ((0, peer), (peer, 0)):
                if self.rank == source:
                    dist.send(tensor, target)
                elif self.rank == target:
                    dist.recv(tensor, source)

        return self._seconds(there_and_back) / 2

    def close(self) -> None:
        if self.num_ranks > 1:
            dist.destroy_process_group()

    def _bytes(self, number: int) -> torch.Tensor:
        return torch.zeros(number, dtype=torch.uint8, device=self._device)

    def _seconds(self, work: Callable[[], object]) -> float:
        """The median of several runs; the first of all warms up."""
        durations = []
        for _ in range(_REPEATS + 1):
            self._meet()
            start = time.perf_counter()
            work()
            if self._is_on_gpu:
                torch.cuda.synchronize(self._device)
            durations.append(time.perf_counter() - start)
        return median(durations[1:])

    def _meet(self) -> None:
        """All ranks wait for each other, and for what their devices still run."""
        if self.num_ranks > 1:
            dist.barrier()
        if self._is_on_gpu:
            torch.cuda.synchronize(self._device)
