"""What segment attention asks of a kernel."""

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class Gradients(NamedTuple):
    """Gradients of one segment: its query, its own keys and values, and (key, value) of the tokens before it."""

    query: Tensor
    key: Tensor
    value: Tensor
    prefix: tuple[Tensor, Tensor] | None

    @classmethod
    def of_all_keys(cls, query: Tensor, key: Tensor, value: Tensor, start: int) -> "Gradients":
        """From the gradients of all m keys and values, of which the first `start` are before the segment."""
        return cls(query, key[start:], value[start:], (key[:start], value[:start]) if start else None)


class Kernel(Protocol):
    """Bottom-right causal attention: the queries are the last n of the m tokens that keys and values span.

    Shapes are Megatron's, sequence first: query [n, b, h, d], key [m, b, g, d] and value [m, b, g, e] with
    n = m − start, output and its gradient [n, b, h·e]. `dropout` is the probability with which a softmax weight is
    set to zero; the others grow by 1 / (1 − dropout).
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output, contiguous, and what `backward` wants back: the scores' log-sum-exp, the random state of the dropout.

        Draws from PyTorch's default generator of the device, and only where `dropout` is above 0.
        """

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        saved: tuple[Tensor, ...],
        start: int,
        scale: float,
        dropout: float,
    ) -> Gradients:
        """Gradients in Megatron's shapes, contiguous or not."""


class CumulativeLengths(NamedTuple):
    """Documents one after the other: where the queries and the keys of each end, and how many the longest has.

    `query_ends` and `key_ends` are int32 on the device, with a 0 in front. The queries of a document are the last of
    the tokens that its keys span.
    """

    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int


@runtime_checkable
class PackedKernel(Protocol):
    """A kernel that can also do all documents in one call: query [t, h, d], key [u, g, d], value [u, g, d]."""

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output [t, h, d], and what `backward_packed` wants back."""

    def backward_packed(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        saved: tuple[Tensor, ...],
        lengths: CumulativeLengths,
        scale: float,
        dropout: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
