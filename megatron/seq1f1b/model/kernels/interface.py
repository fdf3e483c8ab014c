"""The interface of kernels of segment attention.

Tested in model/test_kernels.py by test_segments_equal_dense_attention.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class AttentionRule:
    """How the queries of a layer weigh the keys that they see; each kernel follows one rule.

    Scores are multiplied by `scale`. A softmax weight is set to zero with the probability `dropout`; the others grow by
    1 / (1 − dropout). A query sees at most `window` keys before its own token, all of them if it is None.
    """

    scale: float
    dropout: float = 0.0
    window: int | None = None


class Saved(NamedTuple):
    """The inputs of a backward. `statistics` are the log-sum-exp of scores, then the random state of the dropout."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    statistics: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """Gradients of the queries, of the last u ≥ n keys and values (earlier ones have none), and of a sink."""

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None = None


class Kernel(Protocol):
    """Bottom-right causal attention by one rule: the queries are the last n of the m tokens that the keys span.

    Query [n, b, h, d], key [m, b, g, d], value [m, b, g, e], output and its gradient [n, b, h, e]. The output is
    contiguous; gradients need not be. `forward` also returns the statistics. It draws from PyTorch's default generator
    of the device, and only if the rule has dropout.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]: ...

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients: ...


class DocumentKernel(Kernel):
    """A kernel that also computes all documents of one sequence, which lie one after the other, in one call. Forward
    and backward then get their `CumulativeLengths` as the last argument, `documents`. Query is [n, h, d], key
    [m, g, d], value [m, g, e] and output [n, h, e]."""
