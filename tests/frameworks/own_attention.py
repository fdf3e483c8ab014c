"""Megatron's local attention, which reads no packed sequences, document by document."""

import os
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron.seq1f1b.process.patches import wrapping


def _by_document(
    forward: Any,
    attention: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    packed_seq_params: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Attention of a pack, queries [t, h, d] and the output [t, h d]; of padded sequences Megatron's own."""
    if packed_seq_params is None:
        # Padding is at the end, so that a mask of tokens [b, s] says nothing to causal attention.
        return forward(attention, query, key, value, None, **options)
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    bounds = packed_seq_params.cu_seqlens_q_padded
    if bounds is None:
        bounds = packed_seq_params.cu_seqlens_q
    for start, end in pairwise(bounds.tolist()):
        of_document = (
            query[start:end].transpose(0, 1),
            key[start:end].transpose(0, 1).repeat_interleave(repeats, dim=0),
            value[start:end].transpose(0, 1).repeat_interleave(repeats, dim=0),
        )
        outputs.append(scaled_dot_product_attention(*(each[None] for each in of_document), is_causal=True)[0])
    return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)


OWN_ATTENTION = wrapping(
    "megatron.core.transformer.dot_product_attention.DotProductAttention.forward",
    _by_document,
    "takes no packs, and a mask [b, 1, s, s] where that of Transformer Engine reads none if it is causal",
)


def forget_backend() -> None:
    """Forget which kernels of attention Megatron has chosen for the model before, which the environment keeps."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
