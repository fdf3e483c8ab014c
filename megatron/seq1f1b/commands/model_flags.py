"""Flags for the sizes of a model, named as in Megatron."""

import argparse

from ..costs import ModelShape


def add_model_flags(parser: argparse.ArgumentParser, **defaults: int) -> None:
    group = parser.add_argument_group("model, as in Megatron")
    group.add_argument("--num-layers", type=int, default=defaults["num_layers"])
    group.add_argument("--hidden-size", type=int, default=defaults["hidden_size"])
    group.add_argument("--num-attention-heads", type=int, default=defaults["num_attention_heads"])
    group.add_argument("--ffn-hidden-size", type=int, help="default: 4 times the hidden size, 8/3 with --swiglu")
    group.add_argument("--kv-channels", type=int, help="size of a head; default: hidden size / heads")
    group.add_argument("--num-query-groups", type=int, help="number of KV heads; default: as many as heads")
    group.add_argument("--swiglu", action="store_true", help="a gated feed-forward block of three matrices")
    group.add_argument("--vocab-size", type=int, default=defaults["vocab_size"], help="padded")


def model_shape(args: argparse.Namespace) -> ModelShape:
    """The sizes that the flags give, with Megatron's defaults."""
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
