"""Multi-latent attention for benchmarks, with the head sizes of DeepSeek-V3 (arXiv 2412.19437, section 4.2)."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron.seq1f1b.model import use_segment_attention
from megatron.seq1f1b.model.attention import latents


def latent_model(args: argparse.Namespace) -> list[torch.nn.Module]:
    """One layer, in bf16 on a GPU and fp32 on a CPU."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    config = MLATransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        rope_type="rope",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    model = GPTModel(config, spec, args.vocab_size, args.seq_length, position_embedding_type="none")
    return use_segment_attention([model.to(torch.cuda.current_device() if torch.cuda.is_available() else "cpu")])


@contextmanager
def latents_kept(are_kept: bool) -> Iterator[None]:
    """Inside, segments keep latents, or keys and values, whatever the rule for choosing between them."""
    usual = latents.LARGEST_SHARE
    latents.LARGEST_SHARE = inf if are_kept else 0.0
    try:
        yield
    finally:
        latents.LARGEST_SHARE = usual
