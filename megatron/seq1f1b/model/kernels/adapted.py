"""A kernel for head sizes, or with a softmax, that it does not have by itself; and one that runs once where a layer is
recomputed."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .interface import Gradients, Kernel, Saved


@dataclass(frozen=True)
class Padded:
    """Runs `kernel` on heads of one size, a multiple of `multiple_of`, by filling up with zeros.

    Serves multi-latent attention, whose values have smaller heads than its queries, and odd sizes. Zeros change neither
    scores nor what is kept of the output. The padded copies live for the call only.
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
    """[..., d] to [..., size]; `x` itself if it has that size, where `pad` would copy it."""
    missing = size - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


@dataclass(frozen=True)
class WithSink:
    """Runs `kernel` with a `sink` [h], a term in the denominator of each head's softmax that has no value:

        weight_j = exp(score_j) / (exp(sink) + Σ_k exp(score_k))

    With sink 0 that is the off-by-one softmax; gpt-oss (arXiv 2508.10925) learns one for each head. Any kernel serves:
    the sink changes the log-sum-exp, the first of the statistics, by which the output is scaled down and from which the
    kernel's backward starts.
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
        # Σ weight · its gradient over the keys of a query, as [b, h, n]: the sink's own gradient is 0.
        expected = (grad_output * saved.output).to(total.dtype).sum(-1)
        grad_sink = -(weight * expected.permute(1, 2, 0)).sum((0, 2)).to(self.sink.dtype)
        return self.kernel.backward(grad_output, saved)._replace(sink=grad_sink)

    def _sink(self, logsumexp: Tensor) -> Tensor:
        return self.sink.detach().to(logsumexp.dtype).unsqueeze(-1)

    @staticmethod
    def _by_head(logsumexp: Tensor, query: Tensor) -> Tensor:
        """Reshape to [b, h, n], however the kernel groups heads."""
        length, batch, heads, _ = query.shape
        return logsumexp.view(batch, heads, length)


@dataclass(frozen=True)
class RunOnce:
    """`kernel` for a forward that full recomputation repeats; `results` are those of first forwards, by layer and unit.

    The forward of `unit` that is about to run is the first, which autograd does not record, the repeated one, or the
    only one, as `is_recorded` shows. The repeated one needs the output and the statistics for its backward, and nothing
    else that the kernel computes; it takes them, lest the graph keep itself. For n tokens of b sequences, with h query
    heads, values of size e and w bytes an element, a layer keeps b·n·h·(e·w + 4) bytes in between. `generator` is the
    one that the kernel draws from, None if it draws nothing.
    """

    kernel: Kernel
    unit: Hashable
    # Output and statistics, and the state of the generator, which the rest of the layer draws from, too.
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
