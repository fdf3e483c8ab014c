"""Bring segments to the modules of a Megatron model, whatever layer specification built it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from .attention import SegmentAttention
from .experts import follow_segments
from .kernels import KernelChoice
from .segment import SegmentContext
from .weight_gradient import WeightGradientStore, deferring


def use_segment_attention(model: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Replace the `core_attention` of every self-attention layer in the model chunks; nothing else changes.

    Also right for Megatron's own schedules: without a running segment it is plain causal attention.
    """
    chunks = list(model)
    layers = _modules(chunks, (SelfAttention, MLASelfAttention))
    own = [layer for layer in layers if not isinstance(layer.core_attention, SegmentAttention)]
    if own:
        config = own[0].config
        kernels = KernelChoice(config.attention_backend.name, config.flash_attention_version)
        for layer in own:
            # Multi-latent attention scales by its own head sizes, and by YaRN's factor.
            scale = getattr(layer, "softmax_scale", None)
            layer.core_attention = SegmentAttention(layer.config, scale, kernels).train(layer.training)
    return chunks


def attach(chunks: Iterable[torch.nn.Module], context: SegmentContext) -> None:
    """Make the attention, rotary and router modules of the model chunks follow the running segment of `context`.

    The latest call wins, so that several executors can take turns on one model.
    """
    chunks = use_segment_attention(chunks)
    for chunk in chunks:
        if not hasattr(chunk, "segment_context"):
            chunk.register_forward_pre_hook(_without_packed_format, with_kwargs=True)
        chunk.segment_context = context
    for attention in _modules(chunks, SegmentAttention):
        attention.context = context
    for rotary in _modules(chunks, (RotaryEmbedding, YarnRotaryEmbedding)):
        if not hasattr(rotary, "segment_context"):
            rotary.register_forward_pre_hook(_start_at_segment, with_kwargs=True)
            if isinstance(rotary, YarnRotaryEmbedding):
                rotary.get_cached_cos_sin = partial(_from_segment_start, rotary, rotary.get_cached_cos_sin)
        rotary.segment_context = context
    for router in _modules(chunks, TopKRouter):
        follow_segments(router, context)


def add_up_all_weight_gradients(chunks: Iterable[torch.nn.Module]) -> None:
    """Let Transformer Engine's layers add the gradient of every unit to `main_grad`.

    Where they write to it themselves (`gradient_accumulation_fusion`), they overwrite it with the gradient of the unit
    that they are told goes forward first, and which in Megatron's schedules goes backward first too. Without their
    cache of transposed weights, which saves nothing but in fp8, they are not told.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "disable_parameter_transpose_cache"):
                module.disable_parameter_transpose_cache = True


@contextmanager
def weight_gradients_left_in(store: WeightGradientStore, chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, the backward of Megatron's local linear layers, the output layer too, leaves weight gradients in `store`.

    All other gradients (norms, biases, embeddings) are cheap and are computed with the input gradients.
    """
    linears = _modules(list(chunks), (ColumnParallelLinear, RowParallelLinear))
    for linear in linears:
        linear._forward_impl = deferring(linear._forward_impl, store)
    try:
        yield
    finally:
        for linear in linears:
            del linear._forward_impl


@contextmanager
def collectives_watched(
    chunks: Iterable[torch.nn.Module], stages: Sequence[int], begin: Callable[[str, int], Callable[[Any], None]]
) -> Iterator[None]:
    """Inside, `begin(kind, stage)` is called as Megatron's DistributedDataParallel starts to REDUCE the gradients or to
    GATHER the parameters of a bucket, and what it returns with the handle of what runs from then on, or None.
    """
    watched = []
    for chunk, stage in zip(chunks, stages, strict=True):
        for group in (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())):
            for name, handle, kind in (
                ("start_grad_sync", "grad_reduce_handle", "REDUCE"),
                ("start_param_sync", "param_gather_handle", "GATHER"),
            ):
                setattr(group, name, _watched(group, name, handle, lambda kind=kind, stage=stage: begin(kind, stage)))
                watched.append((group, name))
    try:
        yield
    finally:
        for group, name in watched:
            delattr(group, name)


def _watched(group: Any, name: str, handle: str, begin: Callable[[], Callable[[Any], None]]) -> Callable:
    start = getattr(group, name)

    def watched(*args: Any, **kwargs: Any) -> None:
        running = begin()
        start(*args, **kwargs)
        running(getattr(group, handle))

    return watched


def _start_at_segment(rotary: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Megatron asks for as many positions as there are tokens; they begin where the running segment does."""
    segment = rotary.segment_context.segment
    return args, kwargs if segment is None else {**kwargs, "offset": segment.start}


def _without_packed_format(chunk: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The segment says where documents start, so a model that is also told in Megatron's packed format forgets that.

    Its rotary positions then count from the start of the sequence instead of the document, which comes to the same:
    rotary attention depends on differences of positions only.
    """
    segment = chunk.segment_context.segment
    if segment is not None and segment.documents is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "packed_seq_params"}
    return args, kwargs


def _from_segment_start(rotary: torch.nn.Module, cached: Callable, seq_len: int, **kwargs) -> tuple[Tensor, Tensor]:
    """What the fused rotary embedding of multi-latent attention asks for in place of calling the module.

    The cosines and sines are those of a longer sequence without its first positions, so that one cache serves all
    segments.
    """
    segment = rotary.segment_context.segment
    if segment is None:
        return cached(seq_len, **kwargs)
    cos, sin = cached(segment.start + seq_len, **kwargs)
    return cos[segment.start :], sin[segment.start :]


def _modules(chunks: list[torch.nn.Module], kinds: type | tuple[type, ...]) -> list[torch.nn.Module]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, kinds)]
