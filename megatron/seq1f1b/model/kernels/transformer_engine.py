"""Transformer Engine's fused attention, which is cuDNN's: what Megatron runs on by `--attention-backend fused`."""

from typing import Any

import torch
from torch import Tensor

from ..packed_documents import CumulativeLengths
from .interface import AttentionRule, Gradients, Saved


class TransformerEngineFused:
    """bf16 and fp16; head sizes that are multiples of 8; grouped KV heads; a window or packed documents, or dropout.

    For Transformer Engine 2.20 and later. Tensors stay in Megatron's layout, sequence first, without a transposition.
    Packed documents need a Hopper GPU or a later one.
    """

    def __init__(self, rule: AttentionRule) -> None:
        from transformer_engine.pytorch.cpp_extensions import fused_attn

        self._package = fused_attn
        self._rule = rule
        self._ends: dict[tuple, Tensor] = {}  # the same in all layers and micro-batches

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, statistics = self._forward(query, key, value, self._lengths(query, key), "sbhd")
        return output.flatten(2), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        heads = (*saved.query.shape[:3], saved.value.shape[3])
        saved = saved._replace(output=saved.output.view(heads))
        lengths = self._lengths(saved.query, saved.key)
        return Gradients.of_last_keys(*self._backward(grad_output.reshape(heads), saved, lengths, "sbhd"))

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if query.is_cuda and torch.cuda.get_device_capability()[0] < 9:
            raise ValueError(
                "--attention-backend fused cannot keep packed documents apart on this GPU, since Transformer Engine "
                "does so on Hopper and later only; use --attention-backend flash"
            )
        return self._forward(query, key, value, lengths, "thd")

    def backward_packed(
        self, grad_output: Tensor, saved: Saved, lengths: CumulativeLengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(grad_output, saved, lengths, "thd")

    def _forward(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths, layout: str
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, statistics, *_ = self._package.fused_attn_fwd(
            is_training=True,
            q=query.contiguous(),
            k=key.contiguous(),
            v=value.contiguous(),
            **self._common(query, lengths, layout),
        )
        return output, tuple(statistics)

    def _backward(
        self, grad_output: Tensor, saved: Saved, lengths: CumulativeLengths, layout: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, statistics = saved
        grad_query, grad_key, grad_value, *_ = self._package.fused_attn_bwd(
            q=query.contiguous(),
            k=key.contiguous(),
            v=value.contiguous(),
            o=output.contiguous(),
            d_o=grad_output.contiguous(),
            aux_ctx_tensors=list(statistics),
            do_format=layout,
            dqkv_layout="_".join([layout] * 3),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._common(query, lengths, layout),
        )
        return grad_query, grad_key, grad_value

    def _common(self, query: Tensor, lengths: CumulativeLengths, layout: str) -> dict[str, Any]:
        """What forward and backward are given alike; the causal mask is aligned bottom-right."""
        is_packed = layout == "thd"
        window = self._rule.window
        most = lengths.most_queries, lengths.most_keys
        if is_packed:  # upper bounds, which cuDNN may make a plan for each of: few of them, whatever the documents
            most = tuple(1 << (length - 1).bit_length() for length in most)
        return {
            "max_seqlen_q": most[0],
            "max_seqlen_kv": most[1],
            "cu_seqlens_q": lengths.query_ends,
            "cu_seqlens_kv": lengths.key_ends,
            # Where documents lie in memory, which is one after the other.
            "cu_seqlens_q_padded": lengths.query_ends if is_packed else None,
            "cu_seqlens_kv_padded": lengths.key_ends if is_packed else None,
            "fake_dtype": query.dtype,
            "fused_attention_backend": self._package.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": self._rule.scale,
            "dropout": self._rule.dropout,
            "qkv_layout": "_".join([layout] * 3),
            "o_format": layout,
            "attn_mask_type": "padding_causal_bottom_right" if is_packed else "causal_bottom_right",
            "window_size": (-1 if window is None else window, 0),
        }

    def _lengths(self, query: Tensor, key: Tensor) -> CumulativeLengths:
        """Cumulative lengths of sequences of equal length."""
        ends = []
        for length in (query.shape[0], key.shape[0]):
            found = length, query.shape[1], query.device
            if found not in self._ends:
                stop = (query.shape[1] + 1) * length
                self._ends[found] = torch.arange(0, stop, length, dtype=torch.int32, device=query.device)
            ends.append(self._ends[found])
        return CumulativeLengths(*ends, query.shape[0], key.shape[0])
