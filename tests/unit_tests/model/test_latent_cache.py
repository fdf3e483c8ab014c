"""Multi-latent attention that keeps latents against one softmax over the whole sequence."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model.attention import _Attend, _Call
from megatron.seq1f1b.model.kernels import AttentionRule, KernelChoice, WithSink, on_parts
from megatron.seq1f1b.model.latents import LARGEST_SHARE, LatentCache, share_of_projection
from megatron.seq1f1b.model.segment import Segment, SegmentContext
from support.segments import one_softmax

LENGTH, BATCH, HEADS, RANK, SIZE, ROTARY, VALUE = 90, 2, 3, 6, 8, 4, 5
DOCUMENTS = ((0, 20, 67), (0, 64))


def inputs():
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "weight": (HEADS * (SIZE + VALUE), RANK),
        "latent": (LENGTH, BATCH, RANK),
        "rotary": (LENGTH, BATCH, ROTARY),
        "query": (LENGTH, BATCH, HEADS, SIZE + ROTARY),
        "sink": (HEADS,),
    }
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def keys_values(latent, rotary, weight):
    keys, values = (latent @ weight.T).unflatten(2, (HEADS, -1)).split([SIZE, VALUE], -1)
    return torch.cat([keys, rotary.unsqueeze(2).expand(-1, -1, HEADS, -1)], -1), values


class Attention:
    """The part of a layer that segments pass through, as Megatron's modules call it."""

    def __init__(self, weight):
        self.weight, self.context = weight, SegmentContext()

    def project_up(self, latent):
        return latent @ self.weight.T, None

    def __call__(self, query, latent, rotary, sink):
        segment = self.context.segment
        cache = self.context.cache(self, lambda: LatentCache(LENGTH, self.project_up, SIZE))
        projected, _ = cache.project(latent, segment)
        keys, values = projected.unflatten(2, (HEADS, -1)).split([SIZE, VALUE], -1)
        keys = torch.cat([keys, rotary.unsqueeze(2).expand(-1, -1, HEADS, -1)], -1)
        kernel = WithSink(KernelChoice().kernel(AttentionRule((SIZE + ROTARY) ** -0.5), query, values), sink)
        kernel = on_parts(kernel, segment, None, [(0, segment.length)], query)
        call = _Call(kernel, segment, cache, self.context.end_of_backward(self))
        return _Attend.apply(query, keys, values, sink, cache.take_prefix(), call)


def step(lengths, documents, after_each=lambda attention: None):
    """Output and gradients by name, segment by segment forward and in reverse backward."""
    given = inputs()
    weight, sink = (given.pop(name).requires_grad_() for name in ("weight", "sink"))
    attention, context = (layer := Attention(weight)), layer.context
    bounds = pairwise([0, *torch.tensor(lengths).cumsum(0).tolist()])
    segments = [Segment(0, i, *span, LENGTH, documents) for i, span in enumerate(bounds)]
    parts = [{n: x[s.start : s.end].clone().requires_grad_() for n, x in given.items()} for s in segments]
    outputs = []
    for segment, part in zip(segments, parts, strict=True):
        with context.running(segment, keeps_for_backward=True):
            outputs.append(attention(part["query"], part["latent"], part["rotary"], sink))
        after_each(attention)
    weights = torch.linspace(-1, 1, LENGTH * BATCH * HEADS * VALUE, dtype=torch.float64).view(LENGTH, BATCH, -1)
    for segment in reversed(segments):
        with context.running(segment, keeps_for_backward=True):
            outputs[segment.index].backward(weights[segment.start : segment.end])
        if not segment.is_first:
            after_each(attention)
    context.assert_empty()
    grads = {name: torch.cat([part[name].grad for part in parts]) for name in given}
    return torch.cat(outputs).detach(), weights, grads | {"weight": weight.grad, "sink": sink.grad}


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("lengths", [(50, 40), (40, 3, 30, 17)], ids=str)
def test_segments_equal_one_softmax(lengths, documents):
    output, weights, grads = step(lengths, documents)
    exact = {name: x.requires_grad_() for name, x in inputs().items()}
    keys_and_values = keys_values(exact["latent"], exact["rotary"], exact["weight"])
    expected = one_softmax(exact["query"], *keys_and_values, sink=exact["sink"], documents=documents)
    expected.backward(weights)
    assert (output - expected).abs().max() < 1e-13
    for name, grad in grads.items():
        assert (grad - exact[name].grad).abs().max() < 1e-12 * exact[name].grad.abs().max(), name


def test_kept_are_latents_and_rotary_keys_and_their_gradients():
    kept = []

    def count(attention):
        cache = attention.context.kept()[0]
        kept.append(sum(x._rows.untyped_storage().nbytes() for x in (cache.latents, cache.rotary)))
        kept[-1] += sum(x._sum.numel() * 8 for x in cache.rows if x._sum is not None)
        assert cache._projected is cache._prefix is None

    step((40, 30, 20), None, count)
    row = BATCH * (RANK + ROTARY) * 8
    assert kept == [row * LENGTH] * 3 + [row * (LENGTH + 70), row * (LENGTH + 40)]


def test_latents_are_kept_where_projecting_again_is_cheap():
    deepseek = SimpleNamespace(kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    assert share_of_projection(deepseek, 4096) < LARGEST_SHARE < share_of_projection(deepseek, 2048)
