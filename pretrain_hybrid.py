"""Pretrain a hybrid model, its layers named by --hybrid-layer-pattern; all else is as in pretrain_gpt.py."""

import pretrain_gpt  # before Megatron, which binds the names that are replaced there

# isort: split
from importlib.util import find_spec

from megatron.training.argument_utils import hybrid_config_from_args

from megatron.seq1f1b import local_hybrid_spec


def hybrid_config(args):
    """Megatron's configuration of the model; of Megatron's own layers, for which upstream has no specification."""
    if args.hybrid_layer_pattern is None:
        raise ValueError(
            "pretrain_hybrid.py needs --hybrid-layer-pattern in place of --num-layers, for a GPT '*-' for each layer; "
            "or take pretrain_gpt.py, which needs --num-layers"
        )
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        raise ValueError(
            "--transformer-impl transformer_engine needs its package; install it, or use --transformer-impl local"
        )
    config = hybrid_config_from_args(args)
    if args.transformer_impl == "local" and args.spec is None:
        config.hybrid_stack_spec = local_hybrid_spec(config.transformer)
    return config


if __name__ == "__main__":
    pretrain_gpt.main(hybrid_config, {})
