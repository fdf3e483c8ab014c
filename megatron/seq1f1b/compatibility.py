"""What of Megatron our schedules honour and what they refuse: one table, checked at start-up, shown in the README."""

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple


class Refusal(NamedTuple):
    """A Megatron feature that is refused where `is_on` holds for the parsed arguments."""

    flag: str
    is_on: Callable[[Namespace], bool]
    because: str
    way_out: str


class Honoured(NamedTuple):
    """A Megatron feature that works as without our flags, and what is to be known about it."""

    flag: str
    remark: str = ""


def _given(name: str) -> Callable[[Namespace], bool]:
    return lambda args: bool(getattr(args, name, None))


def _above(limit: float, name: str) -> Callable[[Namespace], bool]:
    return lambda args: (getattr(args, name, None) or 0) > limit


def _other_than(usual: str, name: str) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, name, None) not in (None, usual)


def _is(value: str, name: str) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, name, None) == value


def _fp32_on_a_gpu(args: Namespace) -> bool:
    return args.distributed_backend == "nccl" and not (args.bf16 or args.fp16)


_OWN_SCHEDULE = "drop --pipeline-schedule and --sequence-splits to run Megatron's own schedule"
_WHOLE = "drop --sequence-splits to keep sequences whole"
_ORDER = "follows the order of Megatron's own schedules"
_UNTESTED = "is not tested with our schedules"
_NOT_YET = "is not cut into segments yet"
_NO_LOGITS = "needs attention logits, which the kernels for segments do not keep"

HONOURED = (
    Honoured("`--tensor-model-parallel-size`, `--sequence-parallel`", "segments are multiples of the size"),
    Honoured("`--num-layers-per-virtual-pipeline-stage` and its kin", "looped; V-shaped where a program builds them"),
    Honoured("`--use-distributed-optimizer`, `--overlap-grad-reduce`, `--overlap-param-gather`"),
    Honoured("`--calculate-per-token-loss`, any loss mask", "the loss of a micro-batch, not a mean of segments"),
    Honoured("`--recompute-granularity` `selective`, `full`"),
    Honoured("`--group-query-attention`", "KV heads are never expanded"),
    Honoured("`--position-embedding-type` `rope`, `yarn`, `learned_absolute`, `none`"),
    Honoured("`--untie-embeddings-and-output-weights`, tied embeddings"),
    Honoured("`--reset-position-ids`, `--eod-mask-loss`"),
    Honoured("`--hidden-dropout`"),
    Honoured("`--bf16`, `--fp16`"),
    Honoured("evaluation, checkpoints, `--log-*`, timers, `--step-batch-size-schedule`"),
)

WITH_OUR_SCHEDULES = (
    Refusal("--cuda-graph-impl", _other_than("none", "cuda_graph_impl"), _ORDER, "use --cuda-graph-impl none"),
    Refusal(
        "--defer-embedding-wgrad-compute",
        _given("defer_embedding_wgrad_compute"),
        "pairs activations and gradients in forward order, but segments go backward in reverse",
        "drop it",
    ),
    Refusal("--overlap-moe-expert-parallel-comm", _given("overlap_moe_expert_parallel_comm"), _ORDER, _OWN_SCHEDULE),
    Refusal("--delay-wgrad-compute", _given("delay_wgrad_compute"), _ORDER, _OWN_SCHEDULE),
    Refusal(
        "--fine-grained-activation-offloading",
        _given("fine_grained_activation_offloading"),
        _ORDER,
        _OWN_SCHEDULE,
    ),
    Refusal("--moe-paged-stash", _given("moe_paged_stash"), _ORDER, _OWN_SCHEDULE),
    Refusal(
        "--variable-seq-lengths",
        _given("variable_seq_lengths"),
        "negotiates the shape of every message, which our schedules know in advance",
        "drop it",
    ),
    Refusal(
        "multi-token prediction on a pipeline stage of its own",
        _given("mtp_standalone"),
        "negotiates the shape of every message, which our schedules know in advance",
        "lay it out beside the loss",
    ),
    Refusal("--hybrid-context-parallel", _given("hybrid_context_parallel"), _ORDER, _OWN_SCHEDULE),
    Refusal("--use-megatron-fsdp", _given("use_megatron_fsdp"), _UNTESTED, _OWN_SCHEDULE),
    Refusal("--use-torch-fsdp2", _given("use_torch_fsdp2"), _UNTESTED, _OWN_SCHEDULE),
)

WITH_SEGMENTS = (
    Refusal(
        "--context-parallel-size above 1",
        _above(1, "context_parallel_size"),
        "spreads the keys of a segment over ranks",
        "use --context-parallel-size 1",
    ),
    Refusal("--num-experts", _given("num_experts"), _NOT_YET, _WHOLE),
    Refusal("--mtp-num-layers", _given("mtp_num_layers"), "predicts tokens of the next segment", _WHOLE),
    Refusal("--multi-latent-attention", _given("multi_latent_attention"), _NOT_YET, _WHOLE),
    Refusal("--experimental-attention-variant", _given("experimental_attention_variant"), _NOT_YET, _WHOLE),
    Refusal("--hybrid-layer-pattern", _given("hybrid_layer_pattern"), _NOT_YET, _WHOLE),
    Refusal("--heterogeneous-layers-config-path", _given("heterogeneous_layers_config_path"), _NOT_YET, _WHOLE),
    Refusal("--window-size", _given("window_size"), _NOT_YET, _WHOLE),
    Refusal("--softmax-type", _other_than("vanilla", "softmax_type"), _NOT_YET, "use --softmax-type vanilla"),
    Refusal(
        "--attention-dropout above 0",
        _above(0, "attention_dropout"),
        "is not in the kernels for segments yet",
        "add --attention-dropout 0",
    ),
    Refusal("--reset-attention-mask", _given("reset_attention_mask"), _NOT_YET, "drop it"),
    Refusal("--sft", _given("sft"), "packs documents into a sequence, which " + _NOT_YET, _WHOLE),
    Refusal("--dataloader-inter-document-masking", _given("dataloader_inter_document_masking"), _NOT_YET, "drop it"),
    Refusal(
        "--position-embedding-type mrope",
        _is("mrope", "position_embedding_type"),
        _NOT_YET,
        "use --position-embedding-type rope",
    ),
    Refusal("--qk-clip", _given("qk_clip"), _NO_LOGITS, "drop it"),
    Refusal("--log-max-attention-logit", _given("log_max_attention_logit"), _NO_LOGITS, "drop it"),
    Refusal("--fp8-format", _given("fp8"), _UNTESTED, _WHOLE),
    Refusal(
        "fp32 on a GPU",
        _fp32_on_a_gpu,
        "has no flash attention kernel",
        "add --bf16",
    ),
)

WITH_SPLIT_BACKWARDS = (
    Refusal(
        "--transformer-impl transformer_engine",
        _is("transformer_engine", "transformer_impl"),
        "computes weight gradients together with input gradients",
        "use --transformer-impl local, or a schedule without W such as 1f1b",
    ),
)


def refusal(args: Namespace, has_segments: bool, splits_backwards: bool) -> str | None:
    """One sentence, without its full stop, on the first flag that cannot be honoured; None if all can."""
    rows = WITH_OUR_SCHEDULES
    rows += WITH_SEGMENTS if has_segments else ()
    rows += WITH_SPLIT_BACKWARDS if splits_backwards else ()
    return next((f"{row.flag} {row.because}; {row.way_out}" for row in rows if row.is_on(args)), None)


def segments_are_possible(args: Namespace) -> bool:
    """Whether the attention for segments can stand in for this model's own."""
    return not any(row.is_on(args) for row in WITH_SEGMENTS)


def as_markdown() -> str:
    """The whole table, for the README."""
    lines = ["| feature of Megatron | | |", "|---|---|---|"]
    lines += [f"| {row.flag} | honoured | {row.remark} |" for row in HONOURED]
    for scope, rows in (
        ("with any schedule of ours", WITH_OUR_SCHEDULES),
        ("with segments", WITH_SEGMENTS),
        ("with `zb-h1`, `auto`, files with W", WITH_SPLIT_BACKWARDS),
    ):
        lines += [f"| `{row.flag}` | refused {scope} | {row.because}; {row.way_out} |" for row in rows]
    return "\n".join(lines)
