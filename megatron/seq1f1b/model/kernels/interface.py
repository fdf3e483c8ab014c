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

    Shapes are Megatron's, sequence first: query [n, b, h, d], key and value [m, b, g, d] with n = m − start, output and
    its gradient [n, b, h·d].
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the scores; the latter in whatever shape `backward` wants it back."""

    def backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        start: int,
        scale: float,
    ) -> Gradients:
        """Gradients in Megatron's shapes, contiguous or not."""
