"""Wrappers of a kernel: for other head sizes, for a softmax with a sink, for layers that are recomputed."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .interface import Gradients, Kernel, Saved


@dataclass(frozen=True)
class Padded:
    """Pads heads with zeros to one size, a multiple of `multiple_of`; the padded copies live for the call only.

    For multi-latent attention, whose values have smaller heads than its queries, and for odd sizes. Zeros change
    neither the scores nor the part of the output that is kept.
    """

    kernel: Kernel
    multiple_of: int = 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        size = self._size(query, value)
        output, statistics = self.kernel.forward(*(_pad(x, size) for x in (query, key, value)))
        return output[..., : value.shape[3]].contiguous(), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        *tensors, statistics = saved
        size, value_size = self._size(saved.query, saved.value), saved.value.shape[3]
        padded = Saved(*(_pad(x, size) for x in tensors), statistics)
        query, key, value, _ = self.kernel.backward(_pad(grad_output, size), padded)
        own_size = saved.query.shape[3]
        return Gradients(query[..., :own_size], key[..., :own_size], value[..., :value_size])

    def _size(self, query: Tensor, value: Tensor) -> int:
        largest = max(query.shape[3], value.shape[3])
        return -(-largest // self.multiple_of) * self.multiple_of


def _pad(x: Tensor, size: int) -> Tensor:
    """[..., d] to [..., size], without a copy if `x` has that size."""
    missing = size - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


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
        heads = self._by_head(logsumexp, query)
        total = torch.logaddexp(heads, self._sink(heads))
        kept = (heads - total).exp().permute(2, 0, 1).unsqueeze(-1)
        return (output * kept).to(output.dtype), (total.view_as(logsumexp), *others)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        total = self._by_head(saved.statistics[0], saved.query)
        weight = (self._sink(total) - total).exp()
        # Σ weight · its gradient over the keys of a query; the sink has no value, so it adds nothing.
        expected = (grad_output * saved.output).to(total.dtype).sum(-1)
        grad_sink = -(weight * expected.permute(1, 2, 0)).sum((0, 2)).to(self.sink.dtype)
        return self.kernel.backward(grad_output, saved)._replace(sink=grad_sink)

    def _sink(self, logsumexp: Tensor) -> Tensor:
        return self.sink.detach().to(logsumexp.dtype).unsqueeze(-1)

    @staticmethod
    def _by_head(logsumexp: Tensor, query: Tensor) -> Tensor:
        """As [b, h, n], however the kernel groups heads."""
        length, batch, heads, _ = query.shape
        return logsumexp.view(batch, heads, length)


@dataclass(frozen=True)
class RunOnce:
    """Runs `kernel` once if full recomputation repeats the forward of `unit`; `results` has those of first forwards.

    Autograd does not record a first forward that is repeated (`is_recorded`). The repeated forward takes its output and
    statistics out of `results`, so that the graph does not keep itself. In between a layer keeps b·n·h·(e·w + 4) bytes,
    for n tokens of b sequences, h query heads, values of size e and w bytes an element. `generator` is the one that the
    kernel draws from, None if it draws nothing.
    """

    kernel: Kernel
    unit: Hashable
    # Output, statistics, and the state of the generator, from which the rest of the layer draws, too.
    results: dict[Hashable, tuple[Tensor, tuple[Tensor, ...], Tensor | None]]
    generator: torch.Generator | None
    is_recorded: bool = field(default_factory=torch.is_grad_enabled)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.unit in self.results:
            assert self.is_recorded, "attention of a unit went forward twice before its backward"
            output, statistics, state = self.results.pop(self.unit)
            if self.generator is not None:
                self.generator.set_state(state)
            return output, statistics
        output, statistics = self.kernel.forward(query, key, value)
        if not self.is_recorded:
            state = None if self.generator is None else self.generator.get_state()
            self.results[self.unit] = output, statistics, state
        return output, statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        return self.kernel.backward(grad_output, saved)
