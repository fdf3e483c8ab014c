"""Attention cut into segments, and one softmax over the whole sequence to compare it with."""

from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace

import torch
from torch.utils.checkpoint import checkpoint

from megatron.seq1f1b.model.attention.segment_attention import SegmentAttention
from megatron.seq1f1b.model.segment import Segment, SegmentContext

# Sequences, query heads, KV heads, head size of queries and keys, of values.
HEADS = {
    "64": (1, 2, 2, 64, 64),
    "80, grouped": (2, 4, 2, 80, 80),
    "96": (1, 4, 2, 96, 96),
    "128": (2, 4, 1, 128, 128),
    "odd": (1, 3, 1, 23, 23),
    "latent": (2, 2, 2, 192, 128),
    "latent, one head": (2, 1, 1, 24, 16),
    "latent, odd": (1, 2, 2, 20, 12),
    "wide values": (1, 4, 2, 16, 24),
}


def attention(size, kernel_of=None, dropout=0.0, sequence_parallel=True, **options):
    """A layer for heads of `size`, with a context; with the kernel `kernel_of(rule)` if that is given."""
    config = SimpleNamespace(
        kv_channels=size, softmax_scale=None, attention_dropout=dropout, sequence_parallel=sequence_parallel
    )
    if kernel_of is not None:
        options["kernels"] = SimpleNamespace(kernel=lambda rule, query, value: kernel_of(rule))
    layer = SegmentAttention(config, **options)
    layer.segment_context = SegmentContext()
    return layer


def segments_of(bounds, documents=None):
    """The segments of a micro-batch that is cut at `bounds`, from 0 to the length of the sequence."""
    return [Segment(0, i, *span, bounds[-1], documents) for i, span in enumerate(pairwise(bounds))]


def of_lengths(lengths, documents=None):
    return segments_of([0, *accumulate(lengths)], documents)


class Attended:
    """A sequence through an attention layer, segment by segment: `forward`, then `backward`."""

    def __init__(self, layer, tensors, grad, segments, recompute=False) -> None:
        self.layer = layer
        self.grad = grad
        self.segments = segments
        self.recompute = recompute
        self.parts = [[x[s.start : s.end].detach().clone().requires_grad_() for x in tensors] for s in segments]
        self.outputs = []

    def forward(self) -> None:
        for segment, part in zip(self.segments, self.parts, strict=True):
            call = partial(self._call, segment)
            self.outputs.append(checkpoint(call, *part, use_reentrant=True) if self.recompute else call(*part))
            assert self.outputs[-1].is_contiguous()

    def _call(self, segment, *part):
        with self.layer.segment_context.running(segment, keeps_for_backward=True):
            return self.layer(*part)

    def backward(self) -> None:
        for segment, output in zip(reversed(self.segments), reversed(self.outputs), strict=True):
            with self.layer.segment_context.running(segment, keeps_for_backward=True):
                output.backward(self.grad[segment.start : segment.end])
        self.layer.segment_context.assert_empty()


def run(layer, tensors, grad, segments, recompute=False):
    """Output and gradients of query, key and value [s, b, heads, size]: forward in order, backward in reverse."""
    attended = Attended(
        layer=layer,
        tensors=tensors,
        grad=grad,
        segments=segments,
        recompute=recompute,
    )
    attended.forward()
    attended.backward()
    grads = (torch.cat([part[i].grad for part in attended.parts]) for i in range(3))
    return [torch.cat(attended.outputs).detach(), *grads]


def one_softmax(query, key, value, window=None, sink=None, documents=None, mask=None):
    """softmax(Q·Kᵀ/√d)·mask·V with explicit scores, and a sink that has no value; [s, b, h, d] to [s, b, h·e]."""
    length, batch, heads, size = query.shape
    key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / size**0.5
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(-window)
    if documents is not None:
        numbers = torch.stack([(torch.arange(length)[:, None] >= torch.tensor(row)).sum(1) for row in documents])
        seen = seen & (numbers[:, None, :, None] == numbers[:, None, None])
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, heads, 1, 1).expand(batch, -1, length, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("bhst,tbhd->sbhd", weights if mask is None else weights * mask, value).flatten(2)


def expected(query, key, value, grad, **options):
    """Output and gradients of `one_softmax` in fp64."""
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    output = one_softmax(*exact, **options)
    output.backward(grad.double())
    return [output.detach(), *(x.grad for x in exact)]


def inputs(length, heads, dtype=torch.float64):
    """Query, key, value and the gradient of the output, for sequences, query heads, KV heads and both head sizes."""
    batch, h, g, size, value_size = heads
    query = torch.randn(length, batch, h, size, dtype=dtype)
    key = torch.randn(length, batch, g, size, dtype=dtype)
    value = torch.randn(length, batch, g, value_size, dtype=dtype)
    return query, key, value, torch.randn(length, batch, h * value_size, dtype=dtype)


def worst_error(results, references):
    """The largest error of any result, relative to the largest value of what it should be."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(results, references, strict=True))
