"""What a kernel of segment attention must provide."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

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

    @property
    def start(self) -> int:
        """Keys before the first query."""
        return self.key.shape[0] - self.query.shape[0]


class Gradients(NamedTuple):
    """Gradients of one segment: of its queries, of its own keys and values, and of the sink where there is one.

    `prefix` are those of the keys and values right before the segment; keys before these have none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    prefix: tuple[Tensor, Tensor] | None
    sink: Tensor | None = None

    @classmethod
    def of_last_keys(cls, query: Tensor, key: Tensor, value: Tensor) -> "Gradients":
        """From the gradients of all keys and values, or of the last of them, which end with those of the segment."""
        start = key.shape[0] - query.shape[0]
        return cls(query, key[start:], value[start:], (key[:start], value[:start]) if start else None)


class Kernel(Protocol):
    """Bottom-right causal attention by one rule: the queries are the last n of the m tokens that the keys span.

    Shapes are Megatron's, sequence first: query [n, b, h, d], key [m, b, g, d] and value [m, b, g, e], output and its
    gradient [n, b, h·e].
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output, contiguous, and the statistics that `backward` starts from.

        Draws from PyTorch's default generator of the device, and only where the rule has dropout.
        """

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        """Gradients in Megatron's shapes, contiguous or not."""


@runtime_checkable
class PackedKernel(Protocol):
    """A kernel that can also do all documents in one call: query [t, h, d], key [u, g, d], value [u, g, d]."""

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output [t, h, d], and the statistics that `backward_packed` starts from."""

    def backward_packed(
        self, grad_output: Tensor, saved: Saved, lengths: CumulativeLengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
