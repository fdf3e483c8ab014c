"""Segment attention in place of the attention that a Megatron model was built with."""

from collections.abc import Callable, Iterable, Iterator
from math import gcd
from typing import Any

import torch
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from ..patches import Patch, PatchTable, patched_on, wrapping
from .attention import SegmentAttention
from .head_exchange import HeadExchange
from .kernels import KernelChoice


def use_segment_attention(model: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Replace the `core_attention` of every causal self-attention layer in the model chunks; nothing else changes.

    Also right for Megatron's own schedules: without a running segment it is plain causal attention.
    """
    chunks = list(model)
    kernels = None
    for chunk in chunks:
        for _, layer in _attention_layers(chunk):
            if not _is_causal(layer) or isinstance(layer.core_attention, SegmentAttention):
                continue
            config = layer.config
            kernels = kernels or KernelChoice(
                config.attention_backend.name, config.flash_attention_version, config.attention_dropout > 0
            )
            # Multi-latent attention scales by its own head sizes, and by YaRN's factor.
            scale = getattr(layer, "softmax_scale", None)
            replacement = SegmentAttention(config, scale, kernels, _window(layer), _sink(layer), _exchange(layer))
            own = layer.core_attention
            replacement.train(layer.training)
            patched_on([layer], _in_place_of_attention(replacement))
            _carry_over_hook(chunk, own, replacement)
    return chunks


def _in_place_of_attention(replacement: SegmentAttention) -> PatchTable:
    target = "megatron.core.transformer.attention.Attention.core_attention"
    return (Patch(target, replacement, "attends to the keys of its own input only"),)


def refuse_attention_to_later_tokens(chunks: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if a model whose sequences are cut has attention layers that are not causal self-attention."""
    for chunk in chunks:
        for name, layer in _attention_layers(chunk):
            if not _is_causal(layer):
                raise ValueError(
                    f"{name} is a {type(layer).__name__} with a mask of type {layer.attn_mask_type.name}, whose tokens "
                    "need later ones (an encoder, a vision tower), so that its sequences cannot be cut; drop "
                    "--sequence-splits"
                )


def _attention_layers(chunk: torch.nn.Module) -> Iterator[tuple[str, Attention]]:
    return ((name, module) for name, module in chunk.named_modules() if isinstance(module, Attention))


def _is_causal(layer: Attention) -> bool:
    return isinstance(layer, (SelfAttention, MLASelfAttention)) and layer.attn_mask_type is AttnMaskType.causal


def _window(layer: Attention) -> int | None:
    """Keys before its own that a query of this layer sees, None for all."""
    config = layer.config
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer.layer_number):
        return None
    before, _ = config.window_size
    return None if before < 0 else before


def _sink(layer: Attention) -> Tensor | None:
    """The term in the denominator of the softmax, one for each head: zeros, or the parameter that the layer learns."""
    if layer.config.softmax_type == "learnable":
        return layer.core_attention.softmax_offset
    if layer.config.softmax_type == "off-by-one":
        device = next(layer.parameters()).device
        return torch.zeros(layer.num_attention_heads_per_partition, device=device)
    return None


def _exchange(layer: Attention) -> HeadExchange | None:
    """What lets context-parallel ranks share the heads, as many as can: raises ValueError if they are to share keys
    otherwise."""
    group = layer.pg_collection.cp
    if group.size() == 1:
        return None
    given = layer.config.cp_comm_type or ()
    kinds = {given} if isinstance(given, str) else set(given)
    shared_by = gcd(group.size(), layer.num_attention_heads_per_partition)
    if not kinds or not kinds <= {"a2a", "all_gather"} or "a2a" in kinds and shared_by < group.size():
        raise ValueError(
            f"{group.size()} context-parallel ranks cannot share {layer.num_attention_heads_per_partition} attention "
            f"heads by --cp-comm-type {given}; use a2a for as many ranks as divide the heads, all_gather for more"
        )
    return HeadExchange(group, shared_by)


def _carry_over_hook(chunk: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Megatron's DistributedDataParallel, while it gathers parameters ahead, looks for its hook on every module."""
    handles = getattr(chunk, "remove_forward_pre_hook_handles", {})
    if old in handles:
        for part in old.modules():
            handles.pop(part).remove()
        for part in new.modules():
            handles[part] = part.register_forward_pre_hook(chunk._make_forward_pre_hook())


# With context parallelism, whose ranks share heads, Megatron's local attention is built only to be replaced.
def _built(init: Callable[..., None], attention: Any, config: Any, *args: Any, **options: Any) -> None:
    size, config.context_parallel_size = config.context_parallel_size, 1
    try:
        init(attention, config, *args, **options)
    finally:
        config.context_parallel_size = size


def _not_run(forward: Callable[..., Tensor], attention: Any, *args: Any, **options: Any) -> Tensor:
    if attention.config.context_parallel_size > 1:
        raise ValueError(
            "Megatron's local attention does not see the keys of other context-parallel ranks; give --cp-comm-type "
            "a2a or all_gather and no --attention-backend local"
        )
    return forward(attention, *args, **options)


_LOCAL = "megatron.core.transformer.dot_product_attention.DotProductAttention"

LOCAL_ATTENTION = (
    wrapping(f"{_LOCAL}.__init__", _built, "refuses context parallelism before ours takes its place"),
    wrapping(f"{_LOCAL}.forward", _not_run, "would attend to the keys of one rank where ours does not"),
)
