"""What `attach` changes in the modules of a model, where no equality test reaches it."""

import weakref

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron.seq1f1b.model import Segment, SegmentContext, attach
from megatron.seq1f1b.model.attach import _FOLLOWERS
from megatron.seq1f1b.patches import owner_of


def test_cached_cosines_and_sines_start_where_the_segment_does(monkeypatch):
    """The fused rotary embedding of multi-latent attention, a CUDA kernel, takes them from a cache."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    rotary = YarnRotaryEmbedding(8, original_max_position_embeddings=16, use_cpu_initialization=True)
    whole = rotary.get_cached_cos_sin(48, dtype=torch.float32)
    context = SegmentContext()
    attach([torch.nn.ModuleList([rotary])], context)
    attach([torch.nn.ModuleList([rotary])], context)
    for start, end in ((0, 20), (20, 32), (32, 48)):
        with context.running(Segment(0, 0, start, end, 48), keeps_for_backward=True):
            part = rotary.get_cached_cos_sin(end - start, dtype=torch.float32)
        for got, expected in zip(part, whole, strict=True):
            assert torch.equal(got, expected[start:end]) and got.is_contiguous()
    assert torch.equal(rotary.get_cached_cos_sin(48, dtype=torch.float32)[0], whole[0])


def test_chunks_share_rotary_positions_while_one_needs_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    chunks = [torch.nn.ModuleDict({"rotary": RotaryEmbedding(8, 1.0, use_cpu_initialization=True)}) for _ in range(2)]
    rotaries, context, segment = [chunk["rotary"] for chunk in chunks], SegmentContext(), Segment(0, 1, 4, 10, 16)
    whole = rotaries[0].get_emb(16)
    attach(chunks, context)
    with context.running(segment, keeps_for_backward=True):
        first, second = (rotary(6) for rotary in rotaries)
        assert first is second and torch.equal(first, whole[4:10])
        left = weakref.ref(first)
        del first, second
        RotaryEmbedding.forward.cache_clear()  # Megatron's
        assert left() is None
        assert torch.equal(rotaries[1](6), whole[4:10])


@pytest.mark.parametrize("table", [table for _, table in _FOLLOWERS])
def test_what_is_bound_on_layers_exists_in_this_version(table):
    for patch in table:
        owner, name = owner_of(patch.target)
        assert callable(getattr(owner, name)) and patch.reason, patch.target
