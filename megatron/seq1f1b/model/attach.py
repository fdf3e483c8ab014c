"""Connect the modules of a Megatron model to the running segment, whatever layer specification built it."""

from collections.abc import Callable, Iterable, Iterator
from math import gcd
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from ..process.patches import Patch, owner_of, patched_on
from .attention import rotary
from .attention.head_exchange import HeadExchange
from .attention.latents import keep_latents
from .attention.segment_attention import SegmentAttention
from .kernels import KernelChoice
from .layers import experts, gated_delta_net, mamba, replayed_routes
from .segment import SegmentContext

# Modules that depend on the running segment, with their patches.
_PATCHES = (
    *experts.SEGMENT_PATCHES,
    *gated_delta_net.SEGMENT_PATCHES,
    *mamba.SEGMENT_PATCHES,
    *replayed_routes.SEGMENT_PATCHES,
    *rotary.SEGMENT_PATCHES,
)
_PATCHED = tuple({owner_of(patch.target)[0] for patch in _PATCHES})

# Where a layer has what mixes tokens, and of which kinds segments know what a token needs of earlier ones.
_MIXERS = (
    (TransformerLayer, "self_attention", (Attention, GatedDeltaNet, IdentityOp)),
    (TransformerLayer, "cross_attention", (Attention, IdentityOp)),
    (MambaLayer, "mixer", (MambaMixer,)),
)

# What segment attention computes as well: softmax of causal scores, with the scale, window and sink of the layer.
_REPLACEABLE = (
    "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "megatron.core.extensions.transformer_engine.TEDotProductAttention",
)

KernelsOf = Callable[[TransformerConfig], KernelChoice]  # the choice for a model, by its configuration


def attach(
    chunks: Iterable[torch.nn.Module], context: SegmentContext, kernels_of: KernelsOf = KernelChoice.of_config
) -> None:
    """Make the modules of the model chunks follow the running segment of `context`; the latest call wins. What a
    program computes beside the steps of its schedule stays its own."""
    unattached: list[Any] = [chunk for chunk in chunks if context_of(chunk) is not context]
    use_segment_attention(unattached, kernels_of, outside_of_segments=False)
    for chunk in unattached:
        chunk.segment_context = context
        for path, module in chunk.named_modules():
            keep_latents(module)
            if isinstance(module, (SegmentAttention, *_PATCHED)):
                _follow(module, context, path)
            if isinstance(module, Attention) and isinstance(module.core_attention, SegmentAttention):
                _refuse_other_attention(path, module, module.core_attention)


def context_of(module: torch.nn.Module) -> SegmentContext | None:
    """The context that a module, or a model chunk, follows; None before `attach`."""
    return getattr(module, "segment_context", None)


def _follow(module: Any, context: SegmentContext, path: str) -> None:
    if context_of(module) is None:
        patched_on([module], _PATCHES)
    module.segment_context = context
    module.path_in_chunk = path


def recompute_behind_frozen_weights(chunks: Iterable[torch.nn.Module]) -> None:
    """Let layers that are recomputed get gradients, also if an embedding before them is frozen."""
    for chunk in chunks:
        for module in chunk.modules():
            if not isinstance(module, (TransformerBlock, HybridStack)) or not module.config.recompute_granularity:
                continue
            if _with_gradient not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_with_gradient, with_kwargs=True)


def use_segment_attention(
    model: Iterable[torch.nn.Module],
    kernels_of: KernelsOf = KernelChoice.of_config,
    outside_of_segments: bool = True,
) -> list[torch.nn.Module]:
    """Replace the `core_attention` of every causal self-attention layer in the model chunks; `outside_of_segments` for
    Megatron's own schedules, too, by plain causal attention. Returns the chunks. Raises ValueError for one that
    Megatron does not have, which may compute anything."""
    chunks: list[Any] = list(model)
    kernels = None
    target = "megatron.core.transformer.attention.Attention.core_attention"
    for chunk in chunks:
        # DistributedDataParallel hooks every module while it gathers parameters ahead.
        hooks: dict[Any, Any] = getattr(chunk, "remove_forward_pre_hook_handles", {})
        for name, layer in _attention_layers(chunk):
            old = layer.core_attention
            if not _is_causal(layer) or isinstance(old, SegmentAttention):
                continue
            _require_replaceable(name, old)
            if kernels is None:
                kernels = kernels_of(layer.config)
            new = _segment_attention_for(layer, kernels, outside=None if outside_of_segments else old)
            if old in hooks:
                for part in old.modules():
                    hooks.pop(part).remove()
                hooks[new] = new.register_forward_pre_hook(chunk._make_forward_pre_hook())
            patched_on([layer], [Patch(target, new, "attends to the keys of its own input only")])
    return chunks


def _require_replaceable(name: str, attention: torch.nn.Module) -> None:
    kind = _class_of(attention)
    if kind not in _REPLACEABLE:
        raise ValueError(
            f"{name} computes attention by {kind}, which segments would replace by plain causal attention, without "
            "what it adds to that (capped scores, windows by layer, scaled queries); run this model without segments"
        )


def _segment_attention_for(layer: Any, kernels: KernelChoice, outside: torch.nn.Module | None) -> SegmentAttention:
    """The attention that takes the place of a layer's `core_attention`, with its scale, window and sink; where no
    segment runs, `outside` attends, if it is given."""
    config = layer.config
    window = None
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer.layer_number):
        before = config.window_size[0]
        window = before if before >= 0 else None  # -1: all tokens before
    exchange = None
    group = layer.pg_collection.cp
    if group.size() > 1:
        exchange = HeadExchange(group, row_size=gcd(group.size(), layer.num_attention_heads_per_partition))
    attention = SegmentAttention(
        config=config,
        softmax_scale=getattr(layer, "softmax_scale", None),  # multi-latent attention has its own
        kernels=kernels,
        window=window,
        sink=getattr(layer.core_attention, "softmax_offset", None),
        exchange=exchange,
        outside=outside,
    )
    return attention.train(layer.training)


def refuse_unknown_layers(chunks: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if the model has layers of a program's own in which tokens depend on earlier ones. Chunks that
    follow segments were seen before."""
    for chunk in chunks:
        if context_of(chunk) is not None:
            continue
        for path, layer in chunk.named_modules():
            for kind, name, known in _MIXERS:
                if isinstance(layer, kind):
                    _require_known(f"{path}.{name}", getattr(layer, name), known)


def _require_known(path: str, mixer: torch.nn.Module, known: tuple[type, ...]) -> None:
    if not isinstance(mixer, known) or _replaces_patched_method(mixer):
        raise ValueError(
            f"{path} is a {_class_of(mixer)}, of which segments do not know what a token needs of earlier ones; run "
            "this model without segments"
        )


def _replaces_patched_method(mixer: torch.nn.Module) -> bool:
    """Whether its class computes otherwise what ours would take the place of."""
    for patch in (*gated_delta_net.SEGMENT_PATCHES, *mamba.SEGMENT_PATCHES):
        owner, method = owner_of(patch.target)
        if isinstance(mixer, owner) and getattr(type(mixer), method) is not getattr(owner, method):
            return True
    return False


def _refuse_other_attention(path: str, layer: Attention, attention: SegmentAttention) -> None:
    """Let a `layer` that attends to earlier tokens by other means than its `core_attention` raise ValueError on a part
    of a sequence. Only its forward shows that; nothing stays of this behind the first that does call it."""

    def forget(*_: Any) -> None:
        of_attention.remove()
        of_layer.remove()

    def refuse(*_: Any) -> None:
        segment = attention.segment_context.segment
        if segment is None or (segment.is_whole_sequence and segment.documents is None):
            return
        raise ValueError(
            f"{path} is a {_class_of(layer)}, which does not call its core_attention, so that its tokens would see "
            "none of earlier segments; run this model without segments"
        )

    of_attention = attention.register_forward_pre_hook(forget)
    of_layer = layer.register_forward_hook(refuse)


def refuse_attention_to_later_tokens(chunks: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if the model has attention layers other than causal self-attention."""
    for chunk in chunks:
        for name, layer in _attention_layers(chunk):
            if not _is_causal(layer):
                raise ValueError(
                    f"{name} is a {type(layer).__name__} with a mask of type {layer.attn_mask_type.name}, whose tokens "
                    "need later ones (an encoder, a vision tower) or not all earlier ones (a tree of sequences), so "
                    "that its sequences cannot be cut; drop --sequence-splits or --segment-tokens"
                )


def _class_of(module: torch.nn.Module) -> str:
    """The full name of its class."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _attention_layers(chunk: torch.nn.Module) -> Iterator[tuple[str, Attention]]:
    return ((name, module) for name, module in chunk.named_modules() if isinstance(module, Attention))


def _is_causal(layer: Attention) -> bool:
    return isinstance(layer, (SelfAttention, MLASelfAttention)) and layer.attn_mask_type is AttnMaskType.causal


def _with_gradient(_: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    """Let the input of recomputed layers require a gradient. Else Megatron repeats no forward: the layers get no
    gradients, and their caches are not released."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if torch.is_grad_enabled() and isinstance(hidden, Tensor):
        hidden.requires_grad_()
