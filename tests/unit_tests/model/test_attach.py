"""The changes of `attach` to the modules of a model, as far as no equality test reaches them."""

import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.seq1f1b.model import (
    Segment,
    SegmentContext,
    attach,
    recompute_behind_frozen_weights,
    refuse_attention_to_later_tokens,
    refuse_unknown_layers,
    use_segment_attention,
)
from megatron.seq1f1b.model.attention.segment_attention import SegmentAttention


def bare(kind, **parts):
    """A module of a kind, without all that its own constructor would need, but with these parts."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def attention_layer(kind, mask_type):
    """A layer as far as the replacement looks at it, with an attention of two parts."""
    layer = bare(kind, core_attention=bare(DotProductAttention, part=torch.nn.Identity()))
    layer.attn_mask_type, layer.layer_number, layer.num_attention_heads_per_partition = mask_type, 1, 1
    layer.pg_collection = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    layer.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, attention_dropout=0.0)
    return layer


@pytest.mark.parametrize(
    "kind, mask_type, is_replaced",
    [
        (SelfAttention, AttnMaskType.causal, True),
        (SelfAttention, AttnMaskType.no_mask, False),
        (SelfAttention, AttnMaskType.padding, False),
        (SelfAttention, AttnMaskType.arbitrary, False),
        (CrossAttention, AttnMaskType.padding, False),
    ],
)
def test_only_causal_self_attention_is_replaced(kind, mask_type, is_replaced):
    tower = torch.nn.ModuleDict({"tower": attention_layer(kind, mask_type)})
    use_segment_attention([tower])
    assert isinstance(tower["tower"].core_attention, SegmentAttention) == is_replaced
    if is_replaced:
        refuse_attention_to_later_tokens([tower])
    else:
        words = f"tower is a {kind.__name__} with a mask of type {mask_type.name}.*--sequence-splits"
        with pytest.raises(ValueError, match=words):
            refuse_attention_to_later_tokens([tower])


def test_attention_of_a_programs_own_is_refused():
    """Megatron-Bridge has such for Gemma, with capped scores and windows by layer, and for Ministral."""

    class CappedAttention(DotProductAttention):
        pass

    layer = attention_layer(SelfAttention, AttnMaskType.causal)
    layer.core_attention.__class__ = CappedAttention
    with pytest.raises(
        ValueError, match="^tower computes attention by .*CappedAttention, which segments would replace"
    ):
        use_segment_attention([torch.nn.ModuleDict({"tower": layer})])
    assert type(layer.core_attention) is CappedAttention


class LinearAttention(SelfAttention):
    """As mcore-bridge has it for Ling: a SelfAttention whose own forward attends, by a state."""

    def forward(self, hidden):
        return hidden.cumsum(0)


class CoreAttention(SelfAttention):
    """A forward of a program's own that calls Megatron's part."""

    def forward(self, hidden):
        return self.core_attention(hidden, hidden, hidden)


PARTS = torch.ones(4, 1, 1, 8)
WHOLE = Segment(0, 0, 0, 4, 4)
CUT = Segment(0, 0, 0, 4, 8)
OF_DOCUMENTS = Segment(0, 0, 0, 4, 4, ((0, 2),))


@pytest.mark.parametrize("segment, is_refused", [(WHOLE, False), (CUT, True), (OF_DOCUMENTS, True)])
def test_attention_beside_the_core_attention_is_refused(segment, is_refused):
    """On parts of a sequence, and of documents, of which it would know nothing."""
    layer = attention_layer(LinearAttention, AttnMaskType.causal)
    context = SegmentContext()
    attach([torch.nn.ModuleDict({"tower": layer})], context)
    assert torch.equal(layer(PARTS), PARTS.cumsum(0))
    with context.running(segment, keeps_for_backward=False):
        if is_refused:
            with pytest.raises(ValueError, match="^tower is a .*LinearAttention, which does not call its core_att"):
                layer(PARTS)
        else:
            layer(PARTS)


def test_layers_that_call_their_attention_are_seen_once():
    layer = attention_layer(CoreAttention, AttnMaskType.causal)
    context = SegmentContext()
    attach([torch.nn.ModuleDict({"tower": layer})], context)
    assert layer._forward_hooks and layer.core_attention._forward_pre_hooks
    with context.running(CUT, keeps_for_backward=False):
        layer(PARTS)
    assert not layer._forward_hooks and not layer.core_attention._forward_pre_hooks


class OtherDeltaNet(GatedDeltaNet):
    """As mcore-bridge has it for Qwen3-Next: other places of heads in the projection."""

    def forward(self, hidden):
        return hidden


class DeltaNetOfSameForward(GatedDeltaNet):
    pass


class OtherMixer(MambaMixer):
    def _ssm_training(self, projected):
        return projected


@pytest.mark.parametrize(
    "layer, name",
    [
        (bare(TransformerLayer, self_attention=torch.nn.GRU(4, 4), cross_attention=IdentityOp()), "GRU"),
        (bare(TransformerLayer, self_attention=IdentityOp(), cross_attention=torch.nn.GRU(4, 4)), "GRU"),
        (bare(TransformerLayer, self_attention=bare(OtherDeltaNet), cross_attention=IdentityOp()), "OtherDeltaNet"),
        (bare(MambaLayer, mixer=torch.nn.GRU(4, 4)), "GRU"),
        (bare(MambaLayer, mixer=bare(OtherMixer)), "OtherMixer"),
    ],
)
def test_layers_of_a_programs_own_are_refused(layer, name):
    chunk = torch.nn.ModuleDict({"tower": layer})
    with pytest.raises(ValueError, match=rf"^tower\.\w+ is a .*\.{name}, of which segments do not know"):
        refuse_unknown_layers([chunk])


@pytest.mark.parametrize(
    "layer",
    [
        bare(TransformerLayer, self_attention=bare(SelfAttention), cross_attention=IdentityOp()),
        bare(TransformerLayer, self_attention=bare(DeltaNetOfSameForward), cross_attention=IdentityOp()),
        bare(TransformerLayer, self_attention=IdentityOp(), cross_attention=IdentityOp()),
        bare(MambaLayer, mixer=bare(MambaMixer)),
    ],
)
def test_layers_of_megatron_are_known(layer):
    refuse_unknown_layers([torch.nn.ModuleDict({"tower": layer})])


class PackedAttention(torch.nn.Module):
    """What a layer had before, for any call."""

    def forward(self, query, key, value, attention_mask=None, **given):
        return self.training, attention_mask, given


def test_attention_beside_a_step_stays_that_of_the_program():
    """ms-swift's GRPO runs its model on packs between the steps of the schedule."""
    layer = attention_layer(CoreAttention, AttnMaskType.causal)
    own = layer.core_attention
    own.forward = PackedAttention().forward
    attach([torch.nn.ModuleDict({"tower": layer})], SegmentContext())
    pack = object()
    given = {"attn_mask_type": AttnMaskType.causal, "attention_bias": None, "packed_seq_params": pack}
    assert layer.core_attention(PARTS, PARTS, PARTS, pack, **given)[1:] == (pack, given)
    layer.eval()
    layer.core_attention(PARTS, PARTS, PARTS)
    assert not own.training
    own.hidden_size_per_attention_head_v = 4
    layer.core_attention.hidden_size_per_attention_head_v = 8  # as Megatron does for latents in packs
    assert own.hidden_size_per_attention_head_v == 8
    assert [*layer.state_dict()] == [*dict(layer.named_parameters())] == []
    assert own not in layer.modules()


def test_layers_that_evaluate_get_attention_that_evaluates():
    layers = [attention_layer(SelfAttention, AttnMaskType.causal) for _ in range(2)]
    layers[0].eval()
    use_segment_attention([torch.nn.ModuleList(layers)])
    evaluating, training = (layer.core_attention for layer in layers)
    assert not evaluating.training and training.training
    assert evaluating.kernels is training.kernels  # which warns once


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def test_the_hook_of_a_wrapper_is_carried_over():
    """Megatron's DistributedDataParallel hooks every module to gather parameters ahead."""
    layer = attention_layer(SelfAttention, AttnMaskType.causal)
    wrapper, hook = torch.nn.ModuleList([layer]), lambda *_: None
    wrapper._make_forward_pre_hook = lambda: hook
    handles = {part: part.register_forward_pre_hook(hook) for part in layer.modules()}
    wrapper.remove_forward_pre_hook_handles = handles
    use_segment_attention([wrapper])
    assert handles.keys() == {*layer.modules()} and len(layer.core_attention._forward_pre_hooks) == 1
    for handle in handles.values():
        handle.remove()
    assert not layer.core_attention._forward_pre_hooks


def test_cosines_and_sines_are_parted_among_ranks(monkeypatch):
    """Megatron's function for it copies to a GPU; in its place, every second token."""
    module = sys.modules[YarnRotaryEmbedding.__module__]
    monkeypatch.setattr(module, "get_pos_emb_on_this_cp_rank", lambda rows, _, group: rows[group.rank() :: 2])
    options = {"original_max_position_embeddings": 16, "use_cpu_initialization": True}
    whole = YarnRotaryEmbedding(8, 1.0, **options).get_emb(48)[0].cos()
    context = SegmentContext()
    for rank in range(2):
        rotary = YarnRotaryEmbedding(8, 1.0, **options)
        rotary.cp_group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        attach([torch.nn.ModuleList([rotary])], context)
        with context.running(Segment(0, 0, 20, 32, 48), keeps_for_backward=True):
            assert torch.equal(rotary.get_cached_cos_sin(12, dtype=torch.float32)[0], whole[20 + rank : 32 : 2])


@pytest.mark.parametrize("kind", [RotaryEmbedding, YarnRotaryEmbedding])
def test_rotary_positions_begin_anew_with_each_document(kind):
    """A document that began in an earlier segment goes on from there; several sequences share their positions.

    The fused rotary embedding of multi-latent attention, a CUDA kernel, reads cosines and sines.
    """
    kind.forward.cache_clear()
    rotary, context = kind(8, 1.0, use_cpu_initialization=True), SegmentContext()

    def angles(length):
        found = rotary(length)
        return found[0] if kind is YarnRotaryEmbedding else found

    def cached(index, length):
        return rotary.get_cached_cos_sin(length, dtype=torch.bfloat16)[index]

    of_tables = [angles, *([partial(cached, 0), partial(cached, 1)] if kind is YarnRotaryEmbedding else [])]
    whole = [table(30) for table in of_tables]
    for _ in range(2):
        attach([torch.nn.ModuleList([rotary])], context)
    documents = (0, 13, 16, 29)
    for start, end, places in (
        (0, 10, [*range(10)]),
        (10, 20, [10, 11, 12, 0, 1, 2, 0, 1, 2, 3]),
        (20, 30, [*range(4, 13), 0]),
    ):
        with context.running(Segment(0, 0, start, end, 30, (documents,)), keeps_for_backward=True):
            for table, expected in zip(of_tables, whole, strict=True):
                assert torch.equal(table(end - start), expected[places])
        with context.running(Segment(0, 0, start, end, 30, (documents, (0, 5))), keeps_for_backward=True):
            for table, expected in zip(of_tables, whole, strict=True):
                assert torch.equal(table(end - start), expected[start:end])
    assert all(torch.equal(table(30), expected) for table, expected in zip(of_tables, whole, strict=True))


def test_chunks_share_rotary_positions_while_one_needs_them():
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


def test_recomputed_layers_learn_behind_a_frozen_embedding():
    """Megatron repeats a forward only in the backward of its input."""
    decoder = TransformerBlock.__new__(TransformerBlock)
    torch.nn.Module.__init__(decoder)
    decoder.config = SimpleNamespace(recompute_granularity="full", cuda_graph_impl="none")
    decoder.forward = lambda hidden_states: hidden_states
    chunk = torch.nn.ModuleDict({"decoder": decoder})
    for _ in range(2):
        recompute_behind_frozen_weights([chunk])
    hidden = [torch.ones(1) for _ in range(3)]
    with torch.no_grad():
        assert not decoder(hidden[0]).requires_grad
    assert decoder(hidden[1]).requires_grad and decoder(hidden_states=hidden[2]).requires_grad
    assert decoder(None) is None  # of a later stage, which gets its input as a message
    assert len(decoder._forward_pre_hooks) == 1
