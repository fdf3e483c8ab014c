"""Transformer Engine's fused attention (cuDNN), which Megatron uses with `--attention-backend fused`.

Tested in model/test_cuda_kernel.py.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..packed_documents import CumulativeLengths
from .interface import AttentionRule, DocumentKernel, Gradients, Saved


class TransformerEngineFused(DocumentKernel):
    """bf16 and fp16; head sizes that are multiples of 8; grouped KV heads; a window or packed documents, or dropout.
    For Transformer Engine 2.20 and later; packed documents need a Hopper GPU or a later one."""

    def __init__(self, rule: AttentionRule) -> None:
        from transformer_engine.pytorch.cpp_extensions import fused_attn

        self._package = fused_attn
        self._rule = rule
        self._ends = cache(_cumulative_lengths)  # the same in all layers and micro-batches

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: CumulativeLengths | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if documents is not None and query.is_cuda and torch.cuda.get_device_capability()[0] < 9:
            raise ValueError(
                "--attention-backend fused cannot keep packed documents apart on this GPU, since Transformer Engine "
                "needs Hopper or later for that; use --attention-backend flash"
            )
        output, statistics, *_ = self._package.fused_attn_fwd(
            is_training=True,
            q=query.contiguous(),
            k=key.contiguous(),
            v=value.contiguous(),
            **self._common(query, key, documents),
        )
        return output, tuple(statistics)

    def backward(self, grad_output: Tensor, saved: Saved, documents: CumulativeLengths | None = None) -> Gradients:
        common = self._common(saved.query, saved.key, documents)
        grads = self._package.fused_attn_bwd(
            q=saved.query.contiguous(),
            k=saved.key.contiguous(),
            v=saved.value.contiguous(),
            o=saved.output.contiguous(),
            d_o=grad_output.contiguous(),
            aux_ctx_tensors=list(saved.statistics),
            do_format=common["o_format"],
            dqkv_layout=common["qkv_layout"],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **common,
        )
        return Gradients(*grads[:3])

    def _common(self, query: Tensor, key: Tensor, documents: CumulativeLengths | None) -> dict[str, Any]:
        """Arguments of both forward and backward; the causal mask is aligned bottom-right."""
        if documents is None:
            layout = "sbhd"
            lengths: Sequence[int] = (len(query), len(key))
            starts: Sequence[Tensor | None] = (None, None)
            ends = [self._ends(query.shape[1], length, query.device) for length in lengths]
        else:  # one after the other in memory, too
            layout = "thd"
            ends = [documents.query_ends, documents.key_ends]
            starts = ends
            # Upper bounds; powers of two, since cuDNN may make a plan for each.
            lengths = [1 << (length - 1).bit_length() for length in (documents.most_queries, documents.most_keys)]
        window = self._rule.window
        return {
            "max_seqlen_q": lengths[0],
            "max_seqlen_kv": lengths[1],
            "cu_seqlens_q": ends[0],
            "cu_seqlens_kv": ends[1],
            "cu_seqlens_q_padded": starts[0],
            "cu_seqlens_kv_padded": starts[1],
            "fake_dtype": query.dtype,
            "fused_attention_backend": self._package.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": self._rule.scale,
            "dropout": self._rule.dropout,
            "qkv_layout": "_".join([layout] * 3),
            "o_format": layout,
            "attn_mask_type": "causal_bottom_right" if documents is None else "padding_causal_bottom_right",
            "window_size": (-1 if window is None else window, 0),
        }


def _cumulative_lengths(num_sequences: int, length: int, device: torch.device) -> Tensor:
    """The ends of equal sequences, one after the other, with a 0 in front."""
    return torch.arange(0, (num_sequences + 1) * length, length, dtype=torch.int32, device=device)
