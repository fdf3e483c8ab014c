"""How fast the operations of a model run on a device."""

from collections.abc import Callable
from dataclasses import dataclass, replace


def cpu_slowdown(num_rows: int) -> float:
    """Time of PyTorch's CPU flash attention for `num_rows` queries, relative to the same work in long segments.

    The operator picks its tile by the number of queries: 256 rows from 768 on, 64 from 192 on, 32 below. Measured on a
    Xeon (Cascade Lake), forward and backward alike.
    """
    if num_rows >= 768:
        return 1.0
    return 1.35 if num_rows >= 192 else 2.3


@dataclass(frozen=True)
class DeviceThroughput:
    """Achievable throughput of the ranks that hold one stage together (a tensor-parallel group).

    `matmul`, `attention` and `attention_backward` in FLOP/s; `memory` in elements/s, for the embedding, which is a
    lookup; `overhead` in seconds per layer, segment and direction, for what does not shrink with a segment: launches,
    small kernels, a step of the scheduler. The backward of a matrix product takes `matmul_backward_flops` times the
    FLOPs of its forward, that of flash attention, which computes the scores again, `attention_backward_flops` times.
    `slowdown` gives, for a number of queries, how much longer the attention takes than in long segments; kernels are
    at full speed from `full_speed_rows` queries on.

    Where sequences are cut depends on the ratios of these only.
    """

    matmul: float
    attention: float
    attention_backward: float
    memory: float
    overhead: float = 0.0
    matmul_backward_flops: float = 2.0
    attention_backward_flops: float = 2.5
    slowdown: Callable[[int], float] | None = None
    full_speed_rows: int = 128

    def times(self, factor: float) -> "DeviceThroughput":
        """The throughput of `factor` devices together, each with the same overhead."""
        return replace(
            self,
            matmul=self.matmul * factor,
            attention=self.attention * factor,
            attention_backward=self.attention_backward * factor,
            memory=self.memory * factor,
        )


# Round figures of one device. For your own, measure with tools/profile_segments.py.
A100 = DeviceThroughput(matmul=220e12, attention=180e12, attention_backward=150e12, memory=5e11, overhead=1e-4)
CPU_CORE = DeviceThroughput(
    matmul=80e9,
    attention=70e9,
    attention_backward=75e9,
    memory=1e9,
    overhead=5e-4,
    slowdown=cpu_slowdown,
    full_speed_rows=768,
)
