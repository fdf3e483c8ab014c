"""What segment attention asks of a kernel."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Gradients(NamedTuple):
    """Gradients of one segment: its query, its own keys and values, and (key, value) of the tokens before it."""

    query: Tensor
    key: Tensor
    value: Tensor
    prefix: tuple[Tensor, Tensor] | None


class Kernel(Protocol):
    """Bottom-right causal attention: the queries are the last n of the m tokens that keys and values span.

    Shapes are Megatron's, sequence first: query [n, b, h, d], key [m, b, g, d] and value [m, b, g, e] with
    n = m − start, output and its gradient [n, b, h·e]. `dropout` is the probability with which a softmax weight is
    set to zero; the others grow by 1 / (1 − dropout).
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float, dropout: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output, and what `backward` wants back: the log-sum-exp of the scores, the random state of the dropout.

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
