"""Flags for the sizes of a model, named as in Megatron."""

import argparse

from ..planning.costs import ModelShape
from .parsing import count


def add_model_flags(parser: argparse.ArgumentParser, **defaults: int) -> None:
    group = parser.add_argument_group("model, as in Megatron")
    group.add_argument("--num-layers", type=count, default=defaults["num_layers"])
    group.add_argument("--hidden-size", type=count, default=defaults["hidden_size"])
    group.add_argument("--num-attention-heads", type=count, default=defaults["num_attention_heads"])
    group.add_argument("--ffn-hidden-size", type=count, help="default: 4 times the hidden size, 8/3 with --swiglu")
    group.add_argument("--kv-channels", type=count, help="size of a head; default: hidden size / heads")
    group.add_argument("--num-query-groups", type=count, help="number of KV heads; default: as many as heads")
    group.add_argument("--swiglu", action="store_true", help="a gated feed-forward block of three matrices")
    group.add_argument("--vocab-size", type=count, default=defaults["vocab_size"], help="padded")


def model_shape(args: argparse.Namespace) -> ModelShape:
    """The sizes that the flags give, with Megatron's defaults; raises ValueError for sizes that do not divide."""
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads {args.num_attention_heads}; "
            "change one, or give --kv-channels"
        )
    if args.num_query_groups is not None and args.num_attention_heads % args.num_query_groups:
        raise ValueError(
            f"--num-attention-heads {args.num_attention_heads} is not a multiple of --num-query-groups "
            f"{args.num_query_groups}; change one"
        )
    ffn_hidden_size = args.ffn_hidden_size
    if ffn_hidden_size is None:
        ffn_hidden_size = int(4 * args.hidden_size * 2 / 3) // 64 * 64 if args.swiglu else 4 * args.hidden_size
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        num_heads=args.num_attention_heads,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        vocab_size=args.vocab_size,
        num_kv_heads=args.num_query_groups,
        is_gated=args.swiglu,
    )
