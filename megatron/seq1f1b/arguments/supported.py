"""What of Megatron our schedules do not support: one table, checked at start-up.

tools/compatibility.py writes it, beside what is supported, into docs/compatibility.md.

Conditions look at the settings of a run, by the names of Megatron's arguments; what is missing there is off.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from ..schedule import splitting_families
from .packages import (
    fused_attention_has_no_backend,
    lacks_delta_nets,
    lacks_flash_attention,
    lacks_transformer_engine,
    layers_lack,
    packs_documents,
)

Condition = Callable[[Mapping[str, Any]], bool]


_SPLITTING = ", ".join(f"`{name}`" for name in splitting_families() if name != "auto")


class Use(Enum):
    """What of ours is in use, where a feature of Megatron may not go with it."""

    ANY_SCHEDULE = "with any schedule of ours"
    SEGMENTS = "with segments"
    SPLIT_BACKWARDS = f"with {_SPLITTING}, files with W"
    V_CHUNKS = "with --pipeline-placement v"


class Unsupported(NamedTuple):
    """A feature of Megatron that ends the program where `is_on` holds.

    `feature`, `because` and `way_out` make up the sentence that the user reads.
    """

    feature: str
    is_on: Condition
    because: str
    way_out: str


def _given(name: str) -> Condition:
    return lambda settings: bool(settings.get(name))


def _all_given(*names: str) -> Condition:
    return lambda settings: all(settings.get(name) for name in names)


def _other_than(usual: str, name: str) -> Condition:
    return lambda settings: settings.get(name) not in (None, usual)


def _is(value: str, name: str) -> Condition:
    return lambda settings: settings.get(name) == value


def _grouped_with_biases(settings: Mapping[str, Any]) -> bool:
    is_grouped = settings.get("transformer_impl") == "transformer_engine" and bool(settings.get("moe_grouped_gemm"))
    return is_grouped and bool(settings.get("add_bias_linear"))


def _has_layers(symbol: str) -> Condition:
    return lambda settings: symbol in (settings.get("hybrid_layer_pattern") or "")


def _with_layers(symbol: str, condition: Condition) -> Condition:
    has_layers = _has_layers(symbol)
    return lambda settings: has_layers(settings) and condition(settings)


def _context_parallel_by(settings: Mapping[str, Any]) -> set[str]:
    kinds = settings.get("cp_comm_type") or ()
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _sends_keys_around(settings: Mapping[str, Any]) -> bool:
    kinds = _context_parallel_by(settings)
    return (settings.get("context_parallel_size") or 1) > 1 and not (kinds and kinds <= {"a2a", "all_gather"})


def _in_8_bits_by(recipe: str) -> Condition:
    return lambda settings: bool(settings.get("fp8")) and (settings.get("fp8_recipe") or "delayed") == recipe


def _groups_tokens_anew(settings: Mapping[str, Any]) -> bool:
    is_context_parallel = (settings.get("context_parallel_size") or 1) > 1
    return bool(settings.get("fp8")) and (is_context_parallel or bool(settings.get("num_experts")))


def _predicts_before_the_loss(settings: Mapping[str, Any]) -> bool:
    if settings.get("mtp_standalone"):  # a program's configuration, whose layout Megatron has parsed
        return True
    layout = settings.get("pipeline_model_parallel_layout")
    return isinstance(layout, str) and "m" in layout.rpartition("|")[0]


def _heads_are_no_multiple(settings: Mapping[str, Any]) -> bool:
    heads = settings.get("num_attention_heads") or 0
    return "a2a" in _context_parallel_by(settings) and bool(
        heads // settings["tensor_model_parallel_size"] % (settings.get("context_parallel_size") or 1)
    )


def _hybridep_needs_equal_lengths(settings: Mapping[str, Any]) -> bool:
    is_used = settings.get("moe_token_dispatcher_type") == "flex"
    is_used &= settings.get("moe_flex_dispatcher_backend") == "hybridep"
    return is_used and packs_documents(settings) and not settings.get("moe_hybridep_pad_uneven_dispatch_inputs")


def _recomputes(module: str) -> Condition:
    return lambda settings: (
        settings.get("recompute_granularity") == "selective" and module in (settings.get("recompute_modules") or ())
    )


def _sees_later_tokens(settings: Mapping[str, Any]) -> bool:
    window = settings.get("window_size") or (0, 0)
    return tuple(window[1:]) != (0,)  # `--window-size 128` is one number


def _routes_by_the_crowd(settings: Mapping[str, Any]) -> bool:
    kinds = settings.get("moe_router_load_balancing_type") or ()
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return not {"sinkhorn", "quantile_balancing"}.isdisjoint(kinds)


# Tokens that share a scale in each --fp8-recipe whose scales are those of a few.
BLOCKS: Mapping[str, int] = MappingProxyType({"mxfp8": 32, "blockwise": 128})

_OWN_SCHEDULE = "drop --pipeline-schedule and --sequence-splits to run Megatron's own schedule"
_WHOLE = "drop --sequence-splits to keep sequences whole"
_ORDER = "follows the order of Megatron's own schedules"
_UNTESTED = "is not tested with our schedules"
_NOT_YET = "is not cut into segments yet"
_CROWD = "makes the experts of a token depend on the tokens beside it, which a segment changes"
_NO_LOGITS = "needs the largest logit of each head, which takes another product of all queries and keys"
_BY_BLOCKS = "use --fp8-recipe mxfp8 or blockwise, whose scales are those of a few tokens"


UNSUPPORTED: Mapping[Use, tuple[Unsupported, ...]] = {
    Use.ANY_SCHEDULE: (
        Unsupported("--cuda-graph-impl", _other_than("none", "cuda_graph_impl"), _ORDER, "use --cuda-graph-impl none"),
        Unsupported(
            "--defer-embedding-wgrad-compute",
            _given("defer_embedding_wgrad_compute"),
            "pairs activations and gradients in forward order, but segments go backward in reverse",
            "drop it",
        ),
        Unsupported(
            "--overlap-moe-expert-parallel-comm", _given("overlap_moe_expert_parallel_comm"), _ORDER, _OWN_SCHEDULE
        ),
        Unsupported("--delay-wgrad-compute", _given("delay_wgrad_compute"), _ORDER, _OWN_SCHEDULE),
        Unsupported(
            "--fine-grained-activation-offloading",
            _given("fine_grained_activation_offloading"),
            _ORDER,
            _OWN_SCHEDULE,
        ),
        Unsupported("--moe-paged-stash", _given("moe_paged_stash"), _ORDER, _OWN_SCHEDULE),
        Unsupported(
            "variable_seq_lengths of a program's configuration",
            _given("variable_seq_lengths"),
            "negotiates the shape of every message, which our schedules fix in advance",
            "drop it",
        ),
        Unsupported("--hybrid-context-parallel", _given("hybrid_context_parallel"), _ORDER, _OWN_SCHEDULE),
        Unsupported("--use-megatron-fsdp", _given("use_megatron_fsdp"), _UNTESTED, _OWN_SCHEDULE),
        Unsupported("--use-torch-fsdp2", _given("use_torch_fsdp2"), _UNTESTED, _OWN_SCHEDULE),
    ),
    Use.SEGMENTS: (
        Unsupported(
            "--context-parallel-size above 1 with another --cp-comm-type than a2a and all_gather",
            _sends_keys_around,
            "moves the keys and values of the whole prefix for every segment",
            "use --cp-comm-type a2a, or all_gather where there are more ranks than attention heads",
        ),
        Unsupported(
            "--cp-comm-type a2a with attention heads of a tensor-parallel rank that --context-parallel-size does not "
            "divide",
            _heads_are_no_multiple,
            "gives each context-parallel rank an equal share of them",
            "use --cp-comm-type all_gather, or a divisor",
        ),
        Unsupported("--moe-expert-capacity-factor", _given("moe_expert_capacity_factor"), _CROWD, "drop it"),
        Unsupported(
            "--moe-router-load-balancing-type sinkhorn, quantile_balancing",
            _routes_by_the_crowd,
            _CROWD,
            "use --moe-router-load-balancing-type aux_loss",
        ),
        Unsupported(
            "--moe-enable-routing-replay",
            _given("moe_enable_routing_replay"),
            "replays the routes of whole micro-batches",
            "drop it",
        ),
        Unsupported(
            "--tp-comm-overlap",
            _given("tp_comm_overlap"),
            "sizes its buffers for whole sequences, which the layers of a segment do not fill",
            "drop it",
        ),
        Unsupported(
            "--mtp-use-repeated-layer",
            _given("mtp_use_repeated_layer"),
            "runs one layer several times on the same segment, whose keys would take one another's place",
            "drop it",
        ),
        Unsupported("--experimental-attention-variant", _given("experimental_attention_variant"), _NOT_YET, _WHOLE),
        Unsupported(
            "--hybrid-layer-pattern with D (sparse attention)",
            _has_layers("D"),
            "chooses among the keys of whole sequences",
            "use * for attention",
        ),
        Unsupported(
            "--recompute-modules mlp with biases",
            lambda settings: _recomputes("mlp")(settings) and bool(settings.get("add_bias_linear")),
            "never ends its first backward in Megatron, since a bias that a recomputed part returns becomes its result",
            "add --disable-bias-linear",
        ),
        Unsupported(
            "--recompute-modules gdn_norm_out",
            _recomputes("gdn_norm_out"),
            _NOT_YET,
            "use --recompute-granularity full, or drop it",
        ),
        Unsupported("--heterogeneous-layers-config-path", _given("heterogeneous_layers_config_path"), _NOT_YET, _WHOLE),
        Unsupported(
            "--window-size with tokens after the query",
            _sees_later_tokens,
            "lets a segment attend to later ones, which have not been computed",
            "give 0 as its second number",
        ),
        Unsupported(
            "--position-embedding-type mrope",
            _is("mrope", "position_embedding_type"),
            _NOT_YET,
            "use --position-embedding-type rope",
        ),
        Unsupported(
            "--allow-ambiguous-pad-tokens with --reset-attention-mask",
            _all_given("reset_attention_mask", "allow_ambiguous_pad_tokens"),
            "erases the tokens that end documents where padding is the same token",
            "drop --allow-ambiguous-pad-tokens",
        ),
        Unsupported("--qk-clip", _given("qk_clip"), _NO_LOGITS, "drop it"),
        Unsupported("--log-max-attention-logit", _given("log_max_attention_logit"), _NO_LOGITS, "drop it"),
        Unsupported(
            "--fp8-recipe delayed",
            _in_8_bits_by("delayed"),
            "scales by the maxima of earlier micro-batches; segments would record the maxima of parts",
            _BY_BLOCKS,
        ),
        Unsupported(
            "--fp8-recipe tensorwise",
            _in_8_bits_by("tensorwise"),
            "scales a tensor by its largest value, and a segment has a part of the tensor",
            _BY_BLOCKS,
        ),
        Unsupported(
            "--fp8-recipe custom", _in_8_bits_by("custom"), "may scale tokens together that segments part", _BY_BLOCKS
        ),
        Unsupported(
            "--fp8-format with --context-parallel-size above 1 or --num-experts",
            _groups_tokens_anew,
            "scales tokens together that segments part",
            "drop --fp8-format",
        ),
        Unsupported(
            "fp8_dot_product_attention or fp8_multi_head_attention",
            lambda settings: bool(
                settings.get("fp8_dot_product_attention") or settings.get("fp8_multi_head_attention")
            ),
            "computes attention in 8 bits, which the kernels for segments do not",
            "drop it",
        ),
        Unsupported(
            "--fp4-format", _given("fp4"), "scales by the largest value of a micro-batch, too", "use --fp8-format"
        ),
        Unsupported(
            "--attention-backend fused with --attention-dropout and a window or packed documents",
            fused_attention_has_no_backend,
            "has no kernel in Transformer Engine",
            "drop --attention-dropout, or use --attention-backend flash",
        ),
        Unsupported(
            "--attention-backend fused without Transformer Engine 2.20 or later",
            lacks_transformer_engine,
            "needs it",
            "install transformer-engine, or use --attention-backend flash",
        ),
        Unsupported(
            "--flash-attention-version without its package",
            lacks_flash_attention,
            "needs it",
            "install FlashAttention-3 or flash-attn-4, or drop it",
        ),
        Unsupported(
            "--moe-flex-dispatcher-backend hybridep with packed documents",
            _hybridep_needs_equal_lengths,
            "needs as many tokens on every rank, while each cuts its segments by its own documents",
            "give --moe-hybridep-pad-uneven-dispatch-inputs, or use deepep",
        ),
        Unsupported(
            "--hybrid-layer-pattern with G on a GPU without a fitting flash-linear-attention",
            _with_layers("G", lacks_delta_nets),
            "needs its kernels, which on Hopper GPUs are wrong or refused with Triton 3.4.0 to 3.7.0",
            "install flash-linear-attention 0.5.2 or later, with Triton 3.7.1 or later or with tilelang",
        ),
        Unsupported(
            "--hybrid-layer-pattern with M on a GPU without mamba-ssm and causal-conv1d",
            _with_layers("M", layers_lack("mamba_ssm", "causal_conv1d")),
            "needs their kernels",
            "install mamba-ssm and causal-conv1d",
        ),
    ),
    Use.SPLIT_BACKWARDS: (
        Unsupported(
            "--moe-grouped-gemm with biases and --transformer-impl transformer_engine",
            _grouped_with_biases,
            "computes the gradients of biases sometimes with those of weights, sometimes with those of inputs",
            "give --disable-bias-linear, or use a schedule without W such as 1f1b",
        ),
        Unsupported(
            "--moe-shared-expert-overlap",
            _given("moe_shared_expert_overlap"),
            "computes shared experts on a stream of their own, whose weight gradients would not be waited for",
            "drop it",
        ),
    ),
    Use.V_CHUNKS: (
        Unsupported(
            "--pipeline-model-parallel-layout with multi-token prediction before the loss",
            _predicts_before_the_loss,
            "keeps a second embedding on a rank of its own",
            "lay them out on one stage, or use --pipeline-placement looped",
        ),
        Unsupported(
            "--ckpt-format torch",
            _is("torch", "ckpt_format"),
            "keeps chunks by the rank that holds them",
            "use --ckpt-format torch_dist",
        ),
    ),
}


def unsupported(settings: Mapping[str, Any], uses: Collection[Use]) -> Iterator[Unsupported]:
    """The features in `settings` that do not go with these of ours."""
    return (row for use in Use if use in uses for row in UNSUPPORTED[use] if row.is_on(settings))


def first_unsupported(settings: Mapping[str, Any], uses: Collection[Use]) -> str | None:
    """One sentence, without its full stop, on the first feature that is not supported; None if all are."""
    row = next(unsupported(settings, uses), None)
    return row and f"{row.feature} {row.because}; {row.way_out}"


def segments_are_possible(settings: Mapping[str, Any]) -> bool:
    """Whether the attention for segments can stand in for this model's own."""
    return first_unsupported(settings, {Use.SEGMENTS}) is None
