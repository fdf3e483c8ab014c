"""Wrappers of a kernel: for other head sizes, for a softmax with a sink, for layers that are recomputed."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..host_memory import taken
from .interface import Gradients, Kernel, Saved


@dataclass(frozen=True)
class Padded:
    """Pads heads with zeros to one size, a multiple of `multiple_of`; the padded copies live for the call only.

    It serves multi-latent attention, where value heads are smaller than query heads, and odd sizes. Zeros change
    neither the scores nor the part of the output that is kept.
    """

    kernel: Kernel
    multiple_of: int = 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, statistics = self.kernel.forward(*self._padded(query, key, value))
        return output[..., : value.shape[3]].contiguous(), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        *tensors, grad_output = self._padded(*saved[:4], grad_output)
        grads = self.kernel.backward(grad_output, Saved(*tensors, saved.statistics))
        return Gradients(*(grad[..., : x.shape[3]] for grad, x in zip(grads[:3], saved[:3], strict=True)))

    def _padded(self, *tensors: Tensor) -> list[Tensor]:
        largest = max(x.shape[3] for x in tensors)
        size = -(-largest // self.multiple_of) * self.multiple_of
        return [x if x.shape[3] == size else torch.nn.functional.pad(x, (0, size - x.shape[3])) for x in tensors]


@dataclass(frozen=True)
class WithSink:
    """Adds a `sink` [h] to the softmax of any kernel, a term in the denominator of each head that has no value:

        weight_j = exp(score_j) / (exp(sink) + Σ_k exp(score_k))

    With sink 0 that is the off-by-one softmax; gpt-oss (arXiv 2508.10925) learns one for each head. The sink changes
    the log-sum-exp, the first of the statistics: the output is scaled down accordingly, and the kernel's backward
    starts from it.
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


@dataclass(frozen=True)
class RunOnce:
    """Runs `kernel` once where full recomputation repeats the forward of `unit`.

    The first forward, without autograd, stores output and statistics in `results`; the repeated one removes them, so
    that the graph does not keep itself alive. In between a layer keeps b·n·h·(e·w + 4) bytes, for n tokens of b
    sequences, h query heads, values of size e and w bytes an element, in what `keep` returns, see HostMemory.
    `generator` is the kernel's random generator, None if it draws nothing; its state after the first forward is
    restored for the rest of the layer.
    """

    kernel: Kernel
    unit: Hashable
    results: dict[Hashable, tuple[list[Any], Tensor | None]]
    keep: Callable[[Tensor], Any]
    generator: torch.Generator | None
    is_recorded: bool = field(default_factory=torch.is_grad_enabled)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.unit in self.results:
            assert self.is_recorded, "attention of a unit went forward twice before its backward"
            kept, state = self.results.pop(self.unit)
            if self.generator is not None:
                self.generator.set_state(state)
            output, *statistics = map(taken, kept)
            return output, tuple(statistics)
        output, statistics = self.kernel.forward(query, key, value)
        if not self.is_recorded:
            state = self.generator and self.generator.get_state()
            self.results[self.unit] = [self.keep(x) for x in (output, *statistics)], state
        return output, statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        return self.kernel.backward(grad_output, saved)
