"""What of Megatron our schedules honour and what they refuse: one table, checked at start-up, shown in the README."""

from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
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


def _all_given(*names: str) -> Callable[[Namespace], bool]:
    return lambda args: all(getattr(args, name, None) for name in names)


def _above(limit: float, name: str) -> Callable[[Namespace], bool]:
    return lambda args: (getattr(args, name, None) or 0) > limit


def _other_than(usual: str, name: str) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, name, None) not in (None, usual)


def _is(value: str, name: str) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, name, None) == value


def _has_layers(symbol: str) -> Callable[[Namespace], bool]:
    return lambda args: symbol in (getattr(args, "hybrid_layer_pattern", None) or "")


def _recomputes(module: str) -> Callable[[Namespace], bool]:
    return lambda args: (
        getattr(args, "recompute_granularity", None) == "selective"
        and module in (getattr(args, "recompute_modules", None) or ())
    )


def _fused_attention(args: Namespace) -> bool:
    return getattr(getattr(args, "attention_backend", None), "name", None) == "fused"


def _flash_attention_is_missing(args: Namespace) -> bool:
    modules = {2: "flash_attn.flash_attn_interface", 4: "flash_attn.cute"}
    module = modules.get(getattr(args, "flash_attention_version", None))
    if module is None or args.distributed_backend != "nccl":
        return False
    try:
        return find_spec(module) is None
    except ImportError:  # of the package around it
        return True


def _routes_by_the_crowd(args: Namespace) -> bool:
    kinds = getattr(args, "moe_router_load_balancing_type", None) or ()
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return not {"sinkhorn", "quantile_balancing"}.isdisjoint(kinds)


_OWN_SCHEDULE = "drop --pipeline-schedule and --sequence-splits to run Megatron's own schedule"
_WHOLE = "drop --sequence-splits to keep sequences whole"
_ORDER = "follows the order of Megatron's own schedules"
_UNTESTED = "is not tested with our schedules"
_NOT_YET = "is not cut into segments yet"
_CROWD = "makes the experts of a token depend on the tokens beside it, which a segment changes"
_NO_LOGITS = "needs attention logits, which the kernels for segments do not keep"

HONOURED = (
    Honoured("`--tensor-model-parallel-size`, `--sequence-parallel`", "segments are multiples of the size"),
    Honoured(
        "`--num-layers-per-virtual-pipeline-stage` and its kin",
        "looped chunks; V-shaped ones in programs that build their own",
    ),
    Honoured(
        "`--microbatch-group-size-per-virtual-pipeline-stage`",
        "not looked at: chunks take turns as early as they can, with the fewest activations",
    ),
    Honoured(
        "`--use-distributed-optimizer`, `--overlap-grad-reduce`, `--overlap-param-gather`",
        "aligned over pipeline ranks as Megatron aligns them; shown by --pipeline-trace",
    ),
    Honoured("`--calculate-per-token-loss`, any loss mask", "the loss of a micro-batch, not a mean of segments"),
    Honoured("`--recompute-granularity` `selective`, `full`"),
    Honoured(
        "`--group-query-attention`",
        "segments keep KV heads as they are; FlashAttention 2 expands their gradients for a moment",
    ),
    Honoured("`--multi-latent-attention`", "keys and values are kept as they come out of the up-projection"),
    Honoured(
        "`--hybrid-layer-pattern` with `*`, `+`, `-`, `E`, `G`, `M`, `|`",
        "recurrent layers pass their state from segment to segment; packed documents reset it",
    ),
    Honoured(
        "`--num-experts`, `--expert-model-parallel-size`, `--expert-tensor-parallel-size`, shared experts",
        "balance losses, z-loss and expert bias are those of the micro-batch, not of segments",
    ),
    Honoured(
        "`--position-embedding-type` `rope`, `yarn`, `learned_absolute`, `none`",
        "with `--rotary-percent`, `--rotary-interleaved`, `--use-rope-scaling`, `--no-rope-freq` and their kin",
    ),
    Honoured("`--qk-layernorm`, `--qk-l2-norm`, `--attention-output-gate`"),
    Honoured("`--untie-embeddings-and-output-weights`, tied embeddings"),
    Honoured("`--reset-position-ids`, `--eod-mask-loss`"),
    Honoured(
        "`--reset-attention-mask`, `--sft`, `--dataloader-inter-document-masking`",
        "attention is computed document by document; `balanced` cuts each micro-batch by its own",
    ),
    Honoured("`--hidden-dropout`"),
    Honoured(
        "`--attention-dropout`",
        "masks follow from the seed and the split; fused on GPUs in 16 bits, plain matrix products, slower, elsewhere",
    ),
    Honoured(
        "`--attention-backend` `auto`, `flash`, `unfused`, `local`",
        "PyTorch's flash attention, which needs no other package; the last two mean plain matrix products",
    ),
    Honoured("`--flash-attention-version` 2, 4", "the kernels of the packages flash-attn and flash-attn-4 instead"),
    Honoured("`--bf16`, `--fp16`, fp32", "fp32 attention on GPUs is not fused, so slower"),
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
    Refusal("--moe-expert-capacity-factor", _given("moe_expert_capacity_factor"), _CROWD, "drop it"),
    Refusal(
        "--moe-router-load-balancing-type sinkhorn, quantile_balancing",
        _routes_by_the_crowd,
        _CROWD,
        "use --moe-router-load-balancing-type aux_loss",
    ),
    Refusal(
        "--moe-enable-routing-replay",
        _given("moe_enable_routing_replay"),
        "replays the routes of whole micro-batches",
        "drop it",
    ),
    Refusal(
        "--tp-comm-overlap",
        _given("tp_comm_overlap"),
        "sizes its buffers for whole sequences, which the layers of a segment do not fill",
        "drop it",
    ),
    Refusal("--mtp-num-layers", _given("mtp_num_layers"), "predicts tokens of the next segment", _WHOLE),
    Refusal("--experimental-attention-variant", _given("experimental_attention_variant"), _NOT_YET, _WHOLE),
    Refusal(
        "--hybrid-layer-pattern with D (sparse attention)",
        _has_layers("D"),
        "chooses among the keys of whole sequences",
        "use * for attention",
    ),
    Refusal(
        "--recompute-modules gdn_norm_out",
        _recomputes("gdn_norm_out"),
        _NOT_YET,
        "use --recompute-granularity full, or drop it",
    ),
    Refusal("--heterogeneous-layers-config-path", _given("heterogeneous_layers_config_path"), _NOT_YET, _WHOLE),
    Refusal("--window-size", _given("window_size"), _NOT_YET, _WHOLE),
    Refusal("--softmax-type", _other_than("vanilla", "softmax_type"), _NOT_YET, "use --softmax-type vanilla"),
    Refusal(
        "--position-embedding-type mrope",
        _is("mrope", "position_embedding_type"),
        _NOT_YET,
        "use --position-embedding-type rope",
    ),
    Refusal(
        "--allow-ambiguous-pad-tokens with --reset-attention-mask",
        _all_given("reset_attention_mask", "allow_ambiguous_pad_tokens"),
        "erases the tokens that end documents where padding is the same token",
        "drop --allow-ambiguous-pad-tokens",
    ),
    Refusal("--qk-clip", _given("qk_clip"), _NO_LOGITS, "drop it"),
    Refusal("--log-max-attention-logit", _given("log_max_attention_logit"), _NO_LOGITS, "drop it"),
    Refusal("--fp8-format", _given("fp8"), _UNTESTED, _WHOLE),
    Refusal(
        "--attention-backend fused",
        _fused_attention,
        "asks for kernels that keep their log-sum-exp to themselves, which segments need",
        "use --attention-backend flash",
    ),
    Refusal(
        "--flash-attention-version 3",
        _is(3, "flash_attention_version"),
        "names kernels that segments do not use",
        "use 2 or 4, or drop it for PyTorch's own",
    ),
    Refusal(
        "--flash-attention-version without its package",
        _flash_attention_is_missing,
        "needs it",
        "install flash-attn (for 2) or flash-attn-4 (for 4), or drop it for PyTorch's own",
    ),
)

WITH_SPLIT_BACKWARDS = (
    Refusal(
        "--transformer-impl transformer_engine",
        _is("transformer_engine", "transformer_impl"),
        "computes weight gradients together with input gradients",
        "use --transformer-impl local, or a schedule without W such as 1f1b",
    ),
    Refusal(
        "--moe-shared-expert-overlap",
        _given("moe_shared_expert_overlap"),
        "computes shared experts on a stream of their own, whose weight gradients would not be waited for",
        "drop it",
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


def packs_documents(args: Namespace) -> bool:
    """Whether sequences hold several documents that must not see one another."""
    return any(_given(name)(args) for name in ("reset_attention_mask", "sft", "dataloader_inter_document_masking"))


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
