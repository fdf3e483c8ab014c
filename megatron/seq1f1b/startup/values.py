"""Numbers on the command line with which no training can run, before anything divides by them."""

import argparse
import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class Limit(NamedTuple):
    """What the numbers of some flags must be."""

    words: str
    holds: Callable[[float], bool]
    names: frozenset[str]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LIMITS = (
    Limit(
        "at least 1",
        lambda value: value >= 1,
        _names(
            """
            num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
            vocab_size make_vocab_size_divisible_by max_position_embeddings seq_length rotary_base
            rotary_seq_len_interpolation_factor recompute_num_layers
            num_experts moe_router_topk moe_router_num_groups moe_router_group_topk moe_ffn_hidden_size
            moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank qk_head_dim v_head_dim
            linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
            mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
            tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
            expert_model_parallel_size expert_tensor_parallel_size num_distributed_optimizer_instances
            num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
            decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
            micro_batch_size global_batch_size rampup_batch_size eval_micro_batch_size eval_global_batch_size
            lr_decay_iters lr_decay_samples hysteresis seed
            log_interval eval_interval save_interval tensorboard_log_interval
            check_weight_hash_across_dp_replicas_interval
            distributed_timeout_minutes ddp_bucket_size ddp_num_buckets dist_ckpt_workers num_dataset_builder_threads
            """
        ),
    ),
    Limit(
        "above 0",
        lambda value: value > 0,
        _names("rotary_percent rope_scaling_factor initial_loss_scale min_loss_scale loss_scale_window"),
    ),
    Limit(
        "at least 0 and below 1",
        lambda value: 0 <= value < 1,
        _names("hidden_dropout attention_dropout adam_beta1 adam_beta2 lion_beta1 lion_beta2 muon_momentum"),
    ),
    Limit(
        "between 0 and 1",
        lambda value: 0 <= value <= 1,
        _names("rotary_percent lr_warmup_fraction optimizer_offload_fraction"),
    ),
)
# All numbers of Megatron's are finite, and none is negative, except these.
UNLIMITED = _names("clip_grad activation_func_clamp_value qk_clip_threshold")
SIGNED = _names(
    """
    null_tokenizer_pad_id null_tokenizer_eod_id glu_linear_offset fp8_margin mup_attn_scale_power mscale mscale_all_dim
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu delta_offload_bytes_across_pp_ranks
    grpo_kl_beta grpo_entropy_term_weight rl_default_top_k inference_batch_times_seqlen_threshold
    fault_injector_offset_seconds
    """
)


def unusable_value(args: Namespace, actions: Iterable[argparse.Action]) -> str | None:
    """A sentence, without its full stop, on the first number that no training can have; None if there is none.

    `actions` are those of Megatron's own parser; a script checks its own flags.
    """
    for action in actions:
        given = getattr(args, action.dest, None)
        if given is None or given == action.default or action.type not in (int, float):
            continue
        for value in given if isinstance(given, list) else [given]:
            wanted = _wanted(action.dest, value)
            if wanted is not None:
                return f"{action.option_strings[0]} {value} must be {wanted}"
    return next(_contradictions(args), None)


def _wanted(name: str, value: float) -> str | None:
    """What a number must be and is not."""
    if math.isnan(value) or math.isinf(value) and name not in UNLIMITED:
        return "a finite number"
    for limit in LIMITS:
        if name in limit.names and not limit.holds(value):
            return limit.words
    return "at least 0" if value < 0 and name not in SIGNED else None


def _contradictions(args: Namespace) -> Iterator[str]:
    """Sentences on pairs of numbers that do not go together."""

    def value(name: str) -> Any:
        return getattr(args, name, None)

    if value("group_query_attention"):
        yield from _not_a_divisor(value, "num_query_groups", "num_attention_heads")
    pattern = value("hybrid_layer_pattern") or ""
    if "M" in pattern and value("mamba_num_heads"):
        yield from _not_a_divisor(value, "mamba_num_groups", "mamba_num_heads")
    if "G" in pattern:
        yield from _not_a_divisor(value, "linear_num_key_heads", "linear_num_value_heads")
    if value("num_experts"):
        yield from _above(value, "moe_router_topk", "num_experts")
    if not value("pipeline_model_parallel_layout"):
        for end in ("first", "last"):
            yield from _above(value, f"decoder_{end}_pipeline_num_layers", "num_layers")
        yield from _chunks_that_do_not_divide(value)
    for unit in () if value("skip_train") else ("iters", "samples"):
        decay = f"lr_decay_{unit}" if value(f"lr_decay_{unit}") is not None else f"train_{unit}"
        yield from _above(value, f"lr_warmup_{unit}", decay, may_be_equal=False)
        yield from _above(value, f"lr_wsd_decay_{unit}", decay)
    if value("lr_warmup_fraction") == 1:
        yield "--lr-warmup-fraction 1.0 leaves no step to the decay of the learning rate; it must be below 1"
    yield from _above(value, "lr_warmup_init", "lr")
    yield from _above(value, "start_weight_decay", "end_weight_decay")
    if value("lr_decay_style") == "WSD" and value("lr_wsd_decay_iters") is value("lr_wsd_decay_samples") is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples"
    if value("sequence_parallel"):
        yield from _not_a_divisor(value, "tensor_model_parallel_size", "seq_length", "with --sequence-parallel ")
    if value("profile"):
        yield from _above(value, "profile_step_start", "profile_step_end", may_be_equal=False)
    if not value("load") and not value("pretrained_checkpoint"):
        if value("ckpt_step") is not None:
            yield f"--ckpt-step {value('ckpt_step')} needs --load or --pretrained-checkpoint"
        if value("use_checkpoint_args"):
            yield "--use-checkpoint-args needs --load or --pretrained-checkpoint"
    if value("wandb_project"):
        if not value("wandb_exp_name"):
            yield "--wandb-project needs --wandb-exp-name"
        if not value("wandb_save_dir") and not value("save"):
            yield "--wandb-project needs --wandb-save-dir or --save"


Value = Callable[[str], Any]


def _not_a_divisor(value: Value, part: str, whole: str, condition: str = "") -> Iterator[str]:
    if value(part) and value(whole) and value(whole) % value(part):
        yield f"{condition}{_words(value, part)} must divide {_words(value, whole)}"


def _above(value: Value, part: str, whole: str, may_be_equal: bool = True) -> Iterator[str]:
    if not value(part) or value(whole) is None:
        return
    if value(part) > value(whole) or value(part) == value(whole) and not may_be_equal:
        yield f"{_words(value, part)} must be {'at most' if may_be_equal else 'below'} {_words(value, whole)}"


def _chunks_that_do_not_divide(value: Value) -> Iterator[str]:
    """Where stages are equal, the layers (with embedding and loss, where these count as layers) must fill all
    chunks."""
    chunks, layers = value("num_virtual_stages_per_pipeline_rank"), value("num_layers")
    ends = (value(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if not chunks or not layers or any(ends) or value("hybrid_layer_pattern"):
        return
    layers += sum(bool(value(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss"))
    if layers % (chunks * value("pipeline_model_parallel_size")):
        yield (
            f"{_words(value, 'num_layers')} does not fill {_words(value, 'num_virtual_stages_per_pipeline_rank')} on "
            f"each of {_words(value, 'pipeline_model_parallel_size')} ranks with equal numbers of layers; choose a "
            "multiple, or --pipeline-model-parallel-layout"
        )


def _words(value: Value, name: str) -> str:
    return f"--{name.replace('_', '-')} {value(name)}"
