"""Pretrain a hybrid model, its layers named by --hybrid-layer-pattern; all else is as in pretrain_gpt.py."""

import pretrain_gpt  # before Megatron, which binds the names that are replaced there

# isort: split
from megatron.training.argument_utils import hybrid_config_from_args

from megatron.seq1f1b import end, local_hybrid_spec


def hybrid_config(args):
    """Megatron's configuration of the model; of Megatron's own layers, for which upstream has no specification."""
    if args.hybrid_layer_pattern is None:
        end("pretrain_hybrid.py needs --hybrid-layer-pattern, for example '*-*-'; --help explains it")
    config = hybrid_config_from_args(args)
    if args.transformer_impl == "local":
        config.hybrid_stack_spec = local_hybrid_spec(config.transformer)
    return config


if __name__ == "__main__":
    pretrain_gpt.main(hybrid_config, {})
