"""What our schedules do not honour yet: one table, checked at start-up and shown in the README."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """A Megatron feature that is refused. `is_on` sees the value of the argument `name`."""

    flag: str
    name: str
    is_on: Callable[[Any], bool]
    because: str
    way_out: str


_given = bool


def _above_one(value: int | None) -> bool:
    return (value or 1) > 1


_STOCK = "drop --pipeline-schedule and --sequence-splits to run Megatron's own schedule"
_NO_SPLITS = "drop --sequence-splits"

# Refused with any schedule of ours.
WITH_OUR_SCHEDULES = (
    Refusal(
        "--cuda-graph-impl",
        "cuda_graph_impl",
        lambda value: value not in (None, "none"),
        "captures the order of Megatron's own schedule",
        "use --cuda-graph-impl none",
    ),
    Refusal(
        "--defer-embedding-wgrad-compute",
        "defer_embedding_wgrad_compute",
        _given,
        "pairs activations and gradients in forward order",
        "drop it",
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "overlap_moe_expert_parallel_comm",
        _given,
        "is a schedule of its own",
        _STOCK,
    ),
    Refusal("--delay-wgrad-compute", "delay_wgrad_compute", _given, "needs a zero-bubble schedule", _STOCK),
    Refusal(
        "--fine-grained-activation-offloading",
        "fine_grained_activation_offloading",
        _given,
        "follows Megatron's own schedule",
        _STOCK,
    ),
    Refusal("--moe-paged-stash", "moe_paged_stash", _given, "follows Megatron's own schedule", _STOCK),
    Refusal(
        "--variable-seq-lengths",
        "variable_seq_lengths",
        _given,
        "negotiates the shape of every message, which our schedules know in advance",
        "drop it",
    ),
    Refusal("--use-megatron-fsdp", "use_megatron_fsdp", _given, "is not tested with our schedules", _STOCK),
    Refusal("--use-torch-fsdp2", "use_torch_fsdp2", _given, "is not tested with our schedules", _STOCK),
)

# Refused when sequences are cut.
WITH_SEGMENTS = (
    Refusal(
        "--context-parallel-size above 1",
        "context_parallel_size",
        _above_one,
        "spreads the keys of a segment over ranks",
        "use --context-parallel-size 1",
    ),
    Refusal("--num-experts", "num_experts", _given, "counts tokens per sequence, not per segment", _NO_SPLITS),
    Refusal("--mtp-num-layers", "mtp_num_layers", _given, "looks into the next segment", _NO_SPLITS),
    Refusal(
        "--multi-latent-attention",
        "multi_latent_attention",
        _given,
        "is not cut into segments yet",
        _NO_SPLITS,
    ),
    Refusal(
        "--experimental-attention-variant",
        "experimental_attention_variant",
        _given,
        "is not cut into segments yet",
        _NO_SPLITS,
    ),
    Refusal(
        "--hybrid-layer-pattern",
        "hybrid_layer_pattern",
        _given,
        "may hold layers whose state is not carried from segment to segment",
        _NO_SPLITS,
    ),
    Refusal(
        "--heterogeneous-layers-config-path",
        "heterogeneous_layers_config_path",
        _given,
        "is not cut into segments yet",
        _NO_SPLITS,
    ),
    Refusal("--window-size", "window_size", _given, "is not cut into segments yet", _NO_SPLITS),
    Refusal(
        "--softmax-type",
        "softmax_type",
        lambda value: value not in (None, "vanilla"),
        "is not cut into segments yet",
        "use --softmax-type vanilla",
    ),
    Refusal(
        "--attention-dropout above 0",
        "attention_dropout",
        lambda value: (value or 0) > 0,
        "is not in the kernels for segments yet",
        "add --attention-dropout 0",
    ),
    Refusal(
        "--reset-attention-mask",
        "reset_attention_mask",
        _given,
        "is not cut into segments yet",
        _NO_SPLITS,
    ),
    Refusal(
        "--sft",
        "sft",
        _given,
        "packs documents, which are not cut into segments yet",
        _NO_SPLITS,
    ),
    Refusal(
        "--dataloader-inter-document-masking",
        "dataloader_inter_document_masking",
        _given,
        "packs documents, which are not cut into segments yet",
        _NO_SPLITS,
    ),
    Refusal(
        "--position-embedding-type mrope",
        "position_embedding_type",
        lambda value: value == "mrope",
        "is not cut into segments yet",
        "use --position-embedding-type rope",
    ),
    Refusal("--qk-clip", "qk_clip", _given, "needs attention logits, which the kernels for segments do not keep", "drop it"),
    Refusal(
        "--log-max-attention-logit",
        "log_max_attention_logit",
        _given,
        "needs attention logits, which the kernels for segments do not keep",
        "drop it",
    ),
    Refusal(
        "--fp8-format",
        "fp8",
        _given,
        "is not tested with segments",
        _NO_SPLITS,
    ),
)


def refusal(args: Namespace) -> str | None:
    """One sentence, without its full stop, on the first flag that cannot be honoured; None if all can."""
    rows = WITH_OUR_SCHEDULES + (WITH_SEGMENTS if (args.sequence_splits or 1) > 1 else ())
    for row in rows:
        if row.is_on(getattr(args, row.name, None)):
            return f"{row.flag} {row.because}; {row.way_out}"
    return None
