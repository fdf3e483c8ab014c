"""Kernels with a sink in their softmax.

Tested in model/test_segment_attention.py by test_segments_equal_one_softmax.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import Gradients, Kernel, Saved


@dataclass(frozen=True)
class WithSink:
    """Adds a `sink` [h] to the softmax of any kernel, a term in the denominator of each head that has no value:

        weight_j = exp(score_j) / (exp(sink) + Σ_k exp(score_k))

    With sink 0 that is the off-by-one softmax; gpt-oss (arXiv 2508.10925) learns one for each head. The sink scales the
    output down and changes the log-sum-exp, the first of the statistics, from which the kernel's backward starts.
    """

    kernel: Kernel
    sink: Tensor

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, (logsumexp, *others) = self.kernel.forward(query, key, value)
        own, sink = self._by_head(logsumexp, query)
        total = torch.logaddexp(own, sink)
        kept = (own - total).exp().permute(2, 0, 1).unsqueeze(-1)
        return (output * kept).to(output.dtype), (total.view_as(logsumexp), *others)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        total, sink = self._by_head(saved.statistics[0], saved.query)
        # Σ weight · its gradient over the keys of a query; the sink has no value, so it adds nothing.
        expected = (grad_output * saved.output).to(total.dtype).sum(-1)
        grad_sink = -((sink - total).exp() * expected.permute(1, 2, 0)).sum((0, 2)).to(self.sink.dtype)
        return self.kernel.backward(grad_output, saved)._replace(sink=grad_sink)

    def _by_head(self, logsumexp: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp as [b, h, n], however the kernel groups heads, and the sink as [h, 1]."""
        length, batch, heads, _ = query.shape
        return logsumexp.view(batch, heads, length), self.sink.detach().to(logsumexp.dtype).unsqueeze(-1)
