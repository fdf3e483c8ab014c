"""A language model with a vision tower in Megatron's training loop, as upstream's pretrain_vlm.py has them.

The language model is causal, the tower is not.
"""

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from pretrain_gpt import train_valid_test_datasets_provider


def model_provider(pre_process=True, post_process=True, config=None, **_):
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    layers, parts = get_gpt_layer_local_spec(), {"pre_process": pre_process, "post_process": post_process}
    model = GPTModel(config, layers, args.padded_vocab_size, args.seq_length, **parts)
    if pre_process:
        model.vision_model = TransformerBlock(config, get_vit_layer_with_local_spec(), post_layer_norm=False)
    return model


def forward_step(data_iterator, model):
    raise AssertionError("no segment of this model may go forward")


if __name__ == "__main__":
    pretrain(
        pretrain_cfg_container_from_args(parse_and_validate_args()),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
