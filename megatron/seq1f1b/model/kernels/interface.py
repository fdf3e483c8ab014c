"""What a kernel of segment attention must provide."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from ..packed_documents import CumulativeLengths


@dataclass(frozen=True)
class AttentionRule:
    """How the queries of a layer weigh the keys that they see; a kernel is chosen for one rule and keeps it.

    Scores are multiplied by `scale`. `dropout` is the probability with which a softmax weight is set to zero; the
    others grow by 1 / (1 − dropout). A query sees at most `window` keys before its own token, all of them if that is
    None.
    """

    scale: float
    dropout: float = 0.0
    window: int | None = None


class Saved(NamedTuple):
    """What the backward of a call starts from, put together by the caller, which may keep keys and values elsewhere.

    `statistics` are the kernel's own: the log-sum-exp of the scores, then the random state of the dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    statistics: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """Gradients of the queries, of the last u ≥ n keys and values, and of the sink where there is one.

    Keys and values before these have none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None = None


class Kernel(Protocol):
    """Bottom-right causal attention by one rule: the queries are the last n of the m tokens that the keys span.

    Shapes are Megatron's, sequence first: query [n, b, h, d], key [m, b, g, d] and value [m, b, g, e], output and its
    gradient [n, b, h, e].
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output, contiguous, and the statistics that `backward` starts from.

        Draws from PyTorch's default generator of the device, and only where the rule has dropout.
        """

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        """Gradients in Megatron's shapes, contiguous or not."""


class DocumentKernel(Kernel):
    """A kernel that can also do the documents of one sequence, which lie one after the other, in one call.

    Then query is [n, h, d], key [m, g, d], value [m, g, e] and output [n, h, e].
    """

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: CumulativeLengths | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As every kernel does, or within each of the `documents`."""

    @abstractmethod
    def backward(self, grad_output: Tensor, saved: Saved, documents: CumulativeLengths | None = None) -> Gradients:
        """As every kernel does, or within each of the `documents`."""
