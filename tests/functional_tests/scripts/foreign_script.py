"""A training script of a user of Megatron, without our flags."""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

import pretrain_gpt as shared

if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults=shared.DEFAULTS)
    args.create_attention_mask_in_dataloader = False
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        shared.train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        shared.forward_step,
    )
