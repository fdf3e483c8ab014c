"""A training script of a user of Megatron, without our flags, that finds out for itself where it runs.

With SEPARATELY in the environment it parses and validates its arguments in two steps, as older scripts do.
"""

import os

from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args, parse_args, validate_args
from megatron.training.global_vars import set_global_variables

import pretrain_gpt as shared


def parsed():
    if "SEPARATELY" not in os.environ:
        return parse_and_validate_args(args_defaults=shared.DEFAULTS)
    args = parse_args()
    validate_args(args, shared.DEFAULTS)
    set_global_variables(args)
    return args


def forward_step(data_iterator, model):
    """Reads by its rank alone; chunks between first and last stage get no data."""
    if data_iterator is not None and model.training:
        assert mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
        reads_labels = shared.get_attr_wrapped_model(model, "post_process")
        assert mpu.is_pipeline_last_stage() or not reads_labels
        assert mpu.is_pipeline_first_stage() or reads_labels
    return shared.forward_step(data_iterator, model)


def embedding_ranks(ranks):
    return sorted({ranks[0], ranks[-1]})


if __name__ == "__main__":
    args = parsed()
    if "MASKS" not in os.environ:
        args.create_attention_mask_in_dataloader = False
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        shared.train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )
