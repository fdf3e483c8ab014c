"""The features of Megatron that our schedules do not support: one table, checked at start-up.

tools/compatibility.py writes it into docs/compatibility.md.

Conditions look at the settings of a run, by the names of Megatron's arguments; what is missing there is off.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from ..schedule import splitting_families
from .packages import (
    delta_nets_are_wrong,
    fused_attention_has_no_backend,
    lacks_mamba,
    lacks_transformer_engine,
    packs_documents,
)

Condition = Callable[[Mapping[str, Any]], object]  # true or false by its truth value


_SPLITTING = ", ".join(f"`{name}`" for name in splitting_families() if name != "auto")


class Use(Enum):
    """Our features that some feature of Megatron does not go with."""

    ANY_SCHEDULE = "with any schedule of ours"
    SEGMENTS = "with segments"
    SPLIT_BACKWARDS = f"with {_SPLITTING}, files with W"
    V_CHUNKS = "with --pipeline-placement v"
    OFFLOAD = "with --offload-activations"
    PARTITIONED_STATE = "with --partition-state"
    UNITS = "with --unit-tokens"


class Unsupported(NamedTuple):
    """A feature of Megatron that ends the program if `is_on` holds; without `is_on`, if its flag is given.

    `feature`, `because` and `way_out` make up the sentence that the user reads.
    """

    feature: str
    because: str
    way_out: str
    is_on: Condition | None = None

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether it is on in these settings."""
        if self.is_on is not None:
            return bool(self.is_on(settings))
        return bool(settings.get(self.feature.removeprefix("--").replace("-", "_")))


def _context_parallel_by(settings: Mapping[str, Any]) -> set[str]:
    kinds = settings.get("cp_comm_type") or ()
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _is_context_parallel(settings: Mapping[str, Any]) -> bool:
    return (settings.get("context_parallel_size") or 1) > 1


def _heads_are_no_multiple(settings: Mapping[str, Any]) -> bool:
    heads = (settings.get("num_attention_heads") or 0) // (settings.get("tensor_model_parallel_size") or 1)
    return "a2a" in _context_parallel_by(settings) and bool(heads % (settings.get("context_parallel_size") or 1))


def _predicts_before_the_loss(settings: Mapping[str, Any]) -> bool:
    if settings.get("mtp_standalone"):  # a program's configuration, whose layout Megatron has parsed
        return True
    layout = settings.get("pipeline_model_parallel_layout")
    return isinstance(layout, str) and "m" in layout.rpartition("|")[0]


def _hybridep_needs_equal_lengths(settings: Mapping[str, Any]) -> bool:
    is_used = settings.get("moe_token_dispatcher_type") == "flex"
    is_used &= settings.get("moe_flex_dispatcher_backend") == "hybridep"
    return is_used and packs_documents(settings) and not settings.get("moe_hybridep_pad_uneven_dispatch_inputs")


def _gathers_tokens(settings: Mapping[str, Any]) -> bool:
    is_used = settings.get("moe_token_dispatcher_type") == "allgather"
    return is_used and (settings.get("expert_model_parallel_size") or 1) > 1


def _has_layers(symbol: str, settings: Mapping[str, Any]) -> bool:
    return symbol in (settings.get("hybrid_layer_pattern") or "")


def _shards_weights(settings: Mapping[str, Any]) -> bool:
    tensor = settings.get("tensor_model_parallel_size") or 1
    parts = {"": tensor, "expert_": settings.get("expert_tensor_parallel_size") or tensor}
    return any((settings.get(f"{of}tensor_parallel_num_weight_shards") or 1) > size for of, size in parts.items())


def _recomputes(module: str, settings: Mapping[str, Any]) -> bool:
    modules = settings.get("recompute_modules") or ()
    return settings.get("recompute_granularity") == "selective" and module in modules


def _balances_by(settings: Mapping[str, Any]) -> set[str]:
    kinds = settings.get("moe_router_load_balancing_type") or ()
    return {kinds} if isinstance(kinds, str) else set(kinds)


# The number of tokens that share a scale, for each --fp8-recipe that scales in blocks.
BLOCKS: Mapping[str, int] = MappingProxyType({"mxfp8": 32, "blockwise": 128})

_OWN_SCHEDULE = "drop --pipeline-schedule and --sequence-splits to run Megatron's own schedule"
_WHOLE = "drop --sequence-splits to keep sequences whole"
_ORDER = "follows the order of Megatron's own schedules"
_UNTESTED = "is not tested with our schedules"
_NOT_YET = "is not cut into segments yet"
_CROWD = "makes the experts of a token depend on the tokens beside it, which a segment changes"
_STEPS_ITSELF = "holds weights of its own that the shares do not follow yet"
_READS_WEIGHTS = "reads weights when none are gathered"
_ONE_SEGMENT = "keeps what every module did last, which is one segment"
_COUNTS_FORWARDS = "takes every forward for a micro-batch"
_NO_LOGITS = "needs the largest logit of each head, which takes another product of all queries and keys"


UNSUPPORTED: Mapping[Use, tuple[Unsupported, ...]] = {
    Use.ANY_SCHEDULE: (
        Unsupported(
            "--cuda-graph-impl",
            _ORDER,
            "use --cuda-graph-impl none",
            lambda settings: settings.get("cuda_graph_impl") not in (None, "none"),
        ),
        Unsupported(
            "--defer-embedding-wgrad-compute",
            "pairs activations and gradients in forward order, but segments go backward in reverse",
            "drop it",
        ),
        Unsupported("--overlap-moe-expert-parallel-comm", _ORDER, _OWN_SCHEDULE),
        Unsupported("--delay-wgrad-compute", _ORDER, _OWN_SCHEDULE),
        Unsupported("--fine-grained-activation-offloading", _ORDER, "use --offload-activations"),
        Unsupported("--moe-paged-stash", _ORDER, _OWN_SCHEDULE),
        Unsupported(
            "--cpu-offloading-num-layers",
            "keeps one forward until its backward, and the next would take its place",
            "use --offload-activations",
            lambda settings: settings.get("cpu_offloading") or settings.get("cpu_offloading_num_layers"),
        ),
        Unsupported(
            "--tensor-parallel-num-weight-shards or --expert-tensor-parallel-num-weight-shards above a group's size",
            _UNTESTED,
            _OWN_SCHEDULE,
            _shards_weights,
        ),
        Unsupported("--hybrid-context-parallel", _ORDER, _OWN_SCHEDULE),
        Unsupported(
            "--inprocess-restart",
            "trains again in a process whose pipeline has failed",
            "drop it, and let torchrun or Slurm start the job again",
        ),
        Unsupported("--use-megatron-fsdp", _UNTESTED, _OWN_SCHEDULE),
        Unsupported("--use-torch-fsdp2", _UNTESTED, _OWN_SCHEDULE),
    ),
    Use.SEGMENTS: (
        Unsupported(
            "--context-parallel-size above 1 with another --cp-comm-type than a2a and all_gather",
            "moves the keys and values of the whole prefix for every segment",
            "use --cp-comm-type a2a, or all_gather where there are more ranks than attention heads",
            lambda settings: (
                _is_context_parallel(settings) and not set() < _context_parallel_by(settings) <= {"a2a", "all_gather"}
            ),
        ),
        Unsupported(
            "--cp-comm-type a2a with attention heads of a tensor-parallel rank that --context-parallel-size does not "
            "divide",
            "gives each context-parallel rank an equal share of them",
            "use --cp-comm-type all_gather, or a divisor",
            _heads_are_no_multiple,
        ),
        Unsupported("--moe-expert-capacity-factor", _CROWD, "drop it"),
        Unsupported("--moe-expert-rank-capacity-factor", _CROWD, "drop it"),
        Unsupported(
            "--moe-router-load-balancing-type sinkhorn, quantile_balancing",
            _CROWD,
            "use --moe-router-load-balancing-type aux_loss",
            lambda settings: _balances_by(settings) & {"sinkhorn", "quantile_balancing"},
        ),
        Unsupported("--moe-enable-routing-replay", "replays the routes of whole micro-batches", "drop it"),
        Unsupported(
            "--mtp-use-repeated-layer",
            "runs one layer several times on the same segment, so that its keys would overwrite one another",
            "drop it",
        ),
        Unsupported("--experimental-attention-variant", _NOT_YET, _WHOLE),
        Unsupported(
            "--hybrid-layer-pattern with D (sparse attention)",
            "chooses among the keys of whole sequences",
            "use * for attention",
            lambda settings: _has_layers("D", settings),
        ),
        Unsupported(
            "--recompute-modules mlp with biases",
            "never ends its first backward in Megatron, since a bias that a recomputed part returns becomes its result",
            "add --disable-bias-linear",
            lambda settings: _recomputes("mlp", settings) and bool(settings.get("add_bias_linear")),
        ),
        Unsupported(
            "--recompute-modules gdn_norm_out",
            _NOT_YET,
            "use --recompute-granularity full, or drop it",
            lambda settings: _recomputes("gdn_norm_out", settings),
        ),
        Unsupported("--heterogeneous-layers-config-path", _NOT_YET, _WHOLE),
        Unsupported(
            "--window-size with tokens after the query",
            "lets a segment attend to later ones, which have not been computed",
            "give 0 as its second number",
            lambda settings: tuple((settings.get("window_size") or (0, 0))[1:]) != (0,),  # `--window-size 128`: one
        ),
        Unsupported(
            "--position-embedding-type mrope",
            _NOT_YET,
            "use --position-embedding-type rope",
            lambda settings: settings.get("position_embedding_type") == "mrope",
        ),
        Unsupported(
            "--allow-ambiguous-pad-tokens with --reset-attention-mask",
            "erases the tokens that end documents where padding is the same token",
            "drop --allow-ambiguous-pad-tokens",
            lambda settings: settings.get("reset_attention_mask") and settings.get("allow_ambiguous_pad_tokens"),
        ),
        Unsupported("--logits-save-dir", _COUNTS_FORWARDS, _WHOLE),
        Unsupported("--save-activations-interval", _ONE_SEGMENT, "drop it"),
        Unsupported("--save-dgrads-interval", _ONE_SEGMENT, "drop it"),
        Unsupported("--save-tokens-per-expert-interval", _COUNTS_FORWARDS, "drop it"),
        Unsupported("--moe-routing-trace-path", _COUNTS_FORWARDS, "drop it"),
        Unsupported("--qk-clip", _NO_LOGITS, "drop it"),
        Unsupported("--log-max-attention-logit", _NO_LOGITS, "drop it"),
        Unsupported(
            "--fp8-recipe delayed, tensorwise, custom",
            "scales by the largest value of whole tensors, but a segment has only a part",
            "use --fp8-recipe mxfp8 or blockwise, whose scales are those of a few tokens",
            lambda settings: bool(settings.get("fp8")) and settings.get("fp8_recipe") not in BLOCKS,
        ),
        Unsupported(
            "--fp8-format with --context-parallel-size above 1 or --num-experts",
            "scales tokens together that lie in different segments",
            "drop --fp8-format",
            lambda settings: (
                bool(settings.get("fp8")) and (_is_context_parallel(settings) or bool(settings.get("num_experts")))
            ),
        ),
        Unsupported(
            "--te-precision-config-file or a recipe of kitchen (quant_recipe)",
            "may scale by the largest value of whole tensors, but a segment has only a part",
            "use --fp8-recipe mxfp8 or blockwise",
            lambda settings: (
                any(settings.get(name) for name in ("te_precision_config_file", "kitchen_config_file", "quant_recipe"))
                or settings.get("kitchen_recipe_number") is not None
            ),
        ),
        Unsupported(
            "fp8_dot_product_attention or fp8_multi_head_attention",
            "computes attention in 8 bits, which the kernels for segments cannot",
            "drop it",
            lambda settings: settings.get("fp8_dot_product_attention") or settings.get("fp8_multi_head_attention"),
        ),
        Unsupported(
            "--fp4-format",
            "scales by the largest value of a micro-batch, too",
            "use --fp8-format",
            lambda settings: settings.get("fp4"),
        ),
        Unsupported(
            "--attention-backend fused with --attention-dropout and a window or packed documents",
            "has no kernel in Transformer Engine",
            "drop --attention-dropout, or use --attention-backend flash",
            fused_attention_has_no_backend,
        ),
        Unsupported(
            "--attention-backend fused without Transformer Engine 2.20 or later",
            "needs it",
            "install transformer-engine, or use --attention-backend flash",
            lacks_transformer_engine,
        ),
        Unsupported(
            "--moe-flex-dispatcher-backend hybridep with packed documents",
            "needs equally many tokens on every rank, but each cuts its segments by its own documents",
            "give --moe-hybridep-pad-uneven-dispatch-inputs, or use deepep",
            _hybridep_needs_equal_lengths,
        ),
        Unsupported(
            "--hybrid-layer-pattern with G, flash-linear-attention before 0.5 and Triton 3.4.0 to 3.7.0",
            "has wrong gradients on Hopper GPUs",
            "install flash-linear-attention 0.5.2 or later, with Triton 3.7.1 or later or with tilelang",
            lambda settings: _has_layers("G", settings) and delta_nets_are_wrong(settings),
        ),
        Unsupported(
            "--hybrid-layer-pattern with M on a GPU without mamba-ssm and causal-conv1d",
            "needs their kernels",
            "install mamba-ssm and causal-conv1d",
            lambda settings: _has_layers("M", settings) and lacks_mamba(settings),
        ),
    ),
    Use.SPLIT_BACKWARDS: (
        Unsupported(
            "--moe-grouped-gemm with biases and --transformer-impl transformer_engine",
            "computes the gradients of biases sometimes with those of weights, sometimes with those of inputs",
            "give --disable-bias-linear, or use a schedule without W such as 1f1b",
            lambda settings: (
                settings.get("transformer_impl") == "transformer_engine"
                and settings.get("moe_grouped_gemm")
                and settings.get("add_bias_linear")
            ),
        ),
        Unsupported(
            "--moe-shared-expert-overlap",
            "computes shared experts on a stream of their own, and nothing would wait for their weight gradients",
            "drop it",
        ),
        Unsupported(
            "--overlap-dispatch-backward-with-experts-wgrad",
            "computes weight gradients in the backward of inputs",
            "drop it, or use a schedule without W such as 1f1b",
        ),
        Unsupported(
            "--tp-comm-overlap",
            "exchanges beside the products of weight gradients, which are computed later",
            "drop it, or use a schedule without W such as 1f1b",
        ),
    ),
    Use.V_CHUNKS: (
        Unsupported(
            "--pipeline-model-parallel-layout with multi-token prediction before the loss",
            "keeps a second embedding on a rank of its own",
            "lay them out on one stage, or use --pipeline-placement looped",
            _predicts_before_the_loss,
        ),
        Unsupported(
            "--ckpt-format torch",
            "keeps chunks by the rank that holds them",
            "use --ckpt-format torch_dist",
            lambda settings: settings.get("ckpt_format") == "torch",
        ),
    ),
    Use.OFFLOAD: (
        Unsupported(
            "--overlap-grad-reduce without --no-gradient-accumulation-fusion",
            "needs marks of parameters, which autograd does not give back where activations move",
            "give --no-gradient-accumulation-fusion",
            lambda settings: settings.get("overlap_grad_reduce") and settings.get("gradient_accumulation_fusion"),
        ),
    ),
    Use.PARTITIONED_STATE: (
        Unsupported(
            "a run without --use-distributed-optimizer",
            "keeps the state of the optimizer whole",
            "add --use-distributed-optimizer",
            lambda settings: settings.get("partition_state") and not settings.get("use_distributed_optimizer"),
        ),
        Unsupported(
            "--num-distributed-optimizer-instances above 1",
            "reduces gradients once more among the instances",
            "drop it",
            lambda settings: (settings.get("num_distributed_optimizer_instances") or 1) > 1,
        ),
        Unsupported(
            "--optimizer other than adam and sgd",
            "keeps parameters in an order of its own",
            "use --optimizer adam",
            lambda settings: settings.get("optimizer") not in (None, "adam", "sgd"),
        ),
        Unsupported("--use-precision-aware-optimizer", _STEPS_ITSELF, "drop it"),
        Unsupported("--optimizer-cpu-offload", _STEPS_ITSELF, "drop it"),
        Unsupported("--overlap-param-gather-with-optimizer-step", "gathers before a chunk is at work", "drop it"),
        Unsupported("--fp8-param-gather", "keeps weights in 8 bits, which are not divided into shares yet", "drop it"),
        Unsupported("--fp4-param-gather", "keeps weights in 4 bits, which are not divided into shares yet", "drop it"),
        Unsupported("--use-nccl-ub", "registers buffers, which then cannot be freed", "drop it"),
        Unsupported("--optimizer-cuda-graph", "replays one step in memory that the next has freed", "drop it"),
        Unsupported(
            "--ddp-param-name-patterns-for-fp32-local-accumulation",
            "sums gradients in memory of its own, which is not divided into shares yet",
            "drop it",
        ),
        Unsupported("--save-wgrads-interval", "reads gradients when none are whole", "drop it"),
        Unsupported("--save-params-interval", _READS_WEIGHTS, "drop it"),
        Unsupported("--moe-routing-trace-dump-weights", _READS_WEIGHTS, "drop it"),
        Unsupported("--log-params-norm", _READS_WEIGHTS, "drop it"),
        Unsupported("--check-weight-hash-across-dp-replicas-interval", _READS_WEIGHTS, "drop it"),
        Unsupported(
            "--ckpt-format other than torch_dist",
            "saves weights on some ranks only, and these would wait for the others",
            "use --ckpt-format torch_dist",
            lambda settings: (
                settings.get("partition_state") and settings.get("ckpt_format") not in (None, "torch_dist")
            ),
        ),
    ),
    Use.UNITS: (
        Unsupported(
            "a run whose documents see one another",
            "has sequences of one length",
            "add --sft, --reset-attention-mask or --dataloader-inter-document-masking, or take --sequence-splits",
            lambda settings: not packs_documents(settings),
        ),
        Unsupported(
            "a run without --calculate-per-token-loss",
            "weighs a token by its micro-batch, which units change",
            "add --calculate-per-token-loss",
            lambda settings: not settings.get("calculate_per_token_loss"),
        ),
        Unsupported(
            "--mtp-num-layers",
            "weighs predictions by their micro-batch, which units change",
            "take --sequence-splits instead of --unit-tokens",
        ),
        Unsupported(
            "--micro-batch-size or --eval-micro-batch-size above 1",
            "puts several sequences side by side, where units put them one after the other",
            "give 1",
            lambda settings: any((settings.get(f"{of}micro_batch_size") or 1) > 1 for of in ("", "eval_")),
        ),
        Unsupported(
            "--moe-token-dispatcher-type allgather with expert parallelism",
            "needs equally many tokens on every rank, but units differ in length",
            "use --moe-token-dispatcher-type alltoall",
            _gathers_tokens,
        ),
        Unsupported(
            "--moe-router-load-balancing-type global_aux_loss",
            "waits in each forward for one of every replica, but units give replicas unequal numbers of them",
            "use --moe-router-load-balancing-type aux_loss",
            lambda settings: "global_aux_loss" in _balances_by(settings),
        ),
    ),
}


def unsupported(settings: Mapping[str, Any], uses: Collection[Use]) -> Iterator[Unsupported]:
    """The features in `settings` that do not go with these uses."""
    return (row for use in Use if use in uses for row in UNSUPPORTED[use] if row.holds(settings))


def first_unsupported(settings: Mapping[str, Any], uses: Collection[Use]) -> str | None:
    """One sentence, without its full stop, on the first feature that is not supported; None if all are."""
    row = next(unsupported(settings, uses), None)
    return row and f"{row.feature} {row.because}; {row.way_out}"


def segments_are_possible(settings: Mapping[str, Any]) -> bool:
    """Whether our attention for segments can replace the model's own."""
    return first_unsupported(settings, {Use.SEGMENTS}) is None
