"""Bring segments to the modules of a Megatron model, whatever layer specification built it."""

from collections.abc import Iterable

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.moe.router import TopKRouter

from ..patches import patched_on
from . import experts, gated_delta_net, mamba
from .attention import SegmentAttention
from .latents import keep_latents
from .packed_format import drop_packed_format
from .positions import start_positions_at_segment
from .segment import SegmentContext
from .self_attention import use_segment_attention

# Layers other than attention that follow the running segment, each with the patches that make it do so.
_FOLLOWERS = (
    (TopKRouter, experts.FOLLOWS),
    (GatedDeltaNet, gated_delta_net.FOLLOWS),
    (MambaMixer, mamba.FOLLOWS),
)


def attach(chunks: Iterable[torch.nn.Module], context: SegmentContext) -> None:
    """Make the modules of the model chunks follow the running segment of `context`.

    The latest call wins, so that several executors can take turns on one model.
    """
    others = [chunk for chunk in chunks if getattr(chunk, "segment_context", None) is not context]
    for chunk in use_segment_attention(others):
        drop_packed_format(chunk, context)
        start_positions_at_segment(chunk, context)
        keep_latents(chunk)
        for module in chunk.modules():
            if isinstance(module, SegmentAttention):
                module.context = context
            for kind, follows in _FOLLOWERS:
                if isinstance(module, kind):
                    if not hasattr(module, "segment_context"):
                        patched_on([module], follows)
                    module.segment_context = context
