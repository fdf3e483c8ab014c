"""A softmax with a sink: a term in the denominator that has no value.

    weight_j = exp(score_j) / (exp(sink) + Σ_k exp(score_k))

With sink 0 that is the off-by-one softmax; gpt-oss (arXiv 2508.10925) learns one for each head. Any kernel serves: the
sink changes the log-sum-exp, by which the output is scaled down and from which the kernel's backward starts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import Gradients, Kernel, Saved


@dataclass(frozen=True)
class WithSink:
    """Runs `kernel` with a `sink` [h] for each head; the first of the kernel's statistics is the log-sum-exp."""

    kernel: Kernel
    sink: Tensor

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, (logsumexp, *others) = self.kernel.forward(query, key, value)
        heads = self._by_head(logsumexp, query)
        total = torch.logaddexp(heads, self._sink(heads))
        kept = (heads - total).exp().permute(2, 0, 1).unsqueeze(-1)
        output = (output.unflatten(2, (query.shape[2], -1)) * kept).to(output.dtype).flatten(2)
        return output, (total.view_as(logsumexp), *others)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        total = self._by_head(saved.statistics[0], saved.query)
        weight = (self._sink(total) - total).exp()
        # Σ weight · its gradient over the keys of a query, as [b, h, n]: the sink's own gradient is 0.
        expected = (grad_output * saved.output).unflatten(2, (saved.query.shape[2], -1)).to(total.dtype).sum(-1)
        grad_sink = -(weight * expected.permute(1, 2, 0)).sum((0, 2)).to(self.sink.dtype)
        return self.kernel.backward(grad_output, saved)._replace(sink=grad_sink)

    def _sink(self, logsumexp: Tensor) -> Tensor:
        return self.sink.detach().to(logsumexp.dtype).unsqueeze(-1)

    @staticmethod
    def _by_head(logsumexp: Tensor, query: Tensor) -> Tensor:
        """Reshape to [b, h, n], however the kernel groups heads."""
        length, batch, heads, _ = query.shape
        return logsumexp.view(batch, heads, length)
