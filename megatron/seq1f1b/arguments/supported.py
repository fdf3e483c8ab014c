"""The table of features that our schedules do not support, checked at start-up, and written into docs/compatibility.md
by tools/compatibility.py."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from textwrap import dedent
from types import MappingProxyType
from typing import Any, NamedTuple

from ..schedule import splitting_families
from .layer_layout import stages_of_layout

Settings = Mapping[str, Any]  # by the names of Megatron's arguments; a missing one is off

_SPLITTING = ", ".join(f"`{name}`" for name in splitting_families() if name != "auto")


class Use(Enum):
    """Our features that exclude some feature of Megatron."""

    EVERY_RUN = "with Megatron's own schedules, too"
    MEGATRONS_OWN = "with Megatron's own schedules"
    ANY_SCHEDULE = "with any schedule of ours"
    SEGMENTS = "with segments"
    SPLIT_BACKWARDS = f"with {_SPLITTING}, files with W"
    V_CHUNKS = "with --pipeline-placement v"
    OFFLOAD = "with --offload-activations"
    PARTITIONED_STATE = "with --partition-state"
    SEGMENTS_OF_TOKENS = "with --segment-tokens"
    UNITS = "with --unit-tokens"


class Unsupported(NamedTuple):
    """A row of the table, the sentence that the user reads. The feature is parsed as the condition: clauses such as
    `--flag`, `--flag value, value`, `--flag other than value`, `--flag above 1` and the names in `_FACTS`, joined by
    "with", "and", "on" or "without"."""

    feature: str
    because: str
    way_out: str

    def holds(self, settings: Settings) -> bool:
        """Whether the feature is on in these settings."""
        words = ["with", *re.split(r" (with|and|on|without) ", self.feature)]
        clauses = zip(words[::2], words[1::2], strict=True)
        return all(_holds(clause, settings) != (word == "without") for word, clause in clauses)


def setting_of(flag: str) -> str:
    """The name of a Megatron flag among the settings of a run."""
    name = flag.removeprefix("--").replace("-", "_")
    return {"fp8_format": "fp8", "fp4_format": "fp4", "use_nccl_ub": "nccl_ub"}.get(name, name)


def _holds(clause: str, settings: Settings) -> bool:
    if clause in _FACTS:
        return bool(_FACTS[clause](settings))
    flag, _, words = clause.partition(" ")
    value = settings.get(setting_of(flag))
    if not value or not words:
        return bool(value) and value != "none"
    if words.startswith("above "):
        limit = words.removeprefix("above ")
        return bool(value > (int(limit) if limit.isdigit() else settings.get(setting_of(limit)) or 1))
    values = {*value} if isinstance(value, (list, tuple)) else {getattr(value, "name", value)}
    named = {*words.removeprefix("other than ").split(", ")}
    return bool(values - named if words.startswith("other than ") else values & named)


def packs_documents(settings: Settings) -> bool:
    """Whether sequences hold several documents that must not see one another."""
    names = ("reset_attention_mask", "sft", "dataloader_inter_document_masking", "keep_documents_apart")
    return any(settings.get(name) for name in names)


def is_on_gpu(settings: Settings) -> bool:
    """Whether the run uses GPUs; gloo serves GPUs, too."""
    return settings.get("distributed_backend") == "nccl" or settings.get("device") == "cuda"


def is_on_gpu_here(settings: Settings) -> bool:
    """Whether this machine, with its packages, has the run's GPUs; False in a rehearsal."""
    return is_on_gpu(settings) and not settings.get("dry_run")


def is_on_hopper_here(settings: Settings) -> bool:
    import torch

    return is_on_gpu_here(settings) and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def installed(*distributions: str) -> tuple[int, ...] | None:
    """Up to three numbers of the version of the first distribution that is installed; None if none is."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return tuple(map(int, re.findall(r"\d+", version(name))[:3]))
    return None


def _heads_are_unequal(settings: Settings) -> bool:
    heads = (settings.get("num_attention_heads") or 0) // (settings.get("tensor_model_parallel_size") or 1)
    return heads % (settings.get("context_parallel_size") or 1) > 0


def _predicts_before_the_loss(settings: Settings) -> bool:
    layout = settings.get("pipeline_model_parallel_layout")
    return layout is not None and any("m" in stage for stage in stages_of_layout(layout)[:-1])


def _repeats_embeddings_on_a_rank(settings: Settings) -> bool:
    """Whether several looped chunks of a rank have the embedding, its copy for prediction heads, or the output tied to
    it. Those of a V are refused anyway."""
    layout = settings.get("pipeline_model_parallel_layout")
    if layout is None or settings.get("pipeline_placement") == "v":
        return False
    stages = stages_of_layout(layout)
    is_tied = not settings.get("untie_embeddings_and_output_weights", True)
    holding = [number for number, stage in enumerate(stages) if {"E", "m"} & {*stage} or (is_tied and "L" in stage)]
    ranks = {number % settings["pipeline_model_parallel_size"] for number in holding}
    return any("m" in stage for stage in stages) and len(ranks) < len(holding)


_FACTS: Mapping[str, Callable[[Settings], Any]] = {
    "a run": lambda settings: True,
    "biases": lambda settings: settings.get("add_bias_linear"),
    "fused gradient accumulation": lambda settings: settings.get("gradient_accumulation_fusion"),
    "packed documents": packs_documents,
    "unequal numbers of attention heads": _heads_are_unequal,
    "tokens after the query": lambda settings: tuple(settings["window_size"][1:]) != (0,),  # a single number, too
    "multi-token prediction before the loss": _predicts_before_the_loss,
    "copies of the embedding in several chunks of a rank": _repeats_embeddings_on_a_rank,
    "tied embeddings": lambda settings: not settings.get("untie_embeddings_and_output_weights", True),
    "a recipe of kitchen": lambda settings: settings.get("kitchen_recipe_number") is not None,
    "D (sparse attention)": lambda settings: "D" in settings["hybrid_layer_pattern"],
    "G": lambda settings: "G" in settings["hybrid_layer_pattern"],
    "M": lambda settings: "M" in settings["hybrid_layer_pattern"],
    "a GPU": is_on_gpu,
    "this GPU": is_on_gpu_here,
    "this Hopper GPU": is_on_hopper_here,
    "Transformer Engine 2.20 or later": lambda settings: (installed("transformer-engine") or (0,)) >= (2, 20),
    # Later ones refuse to run where Triton miscompiles their backward.
    "flash-linear-attention before 0.5": lambda settings: (
        (installed("flash-linear-attention", "fla-core") or (9,)) < (0, 5)
    ),
    "Triton 3.4.0 to 3.7.0": lambda settings: (3, 4) <= (installed("triton") or (0,)) < (3, 7, 1),
    "mamba-ssm, causal-conv1d": lambda settings: find_spec("mamba_ssm") and find_spec("causal_conv1d"),
}

# The number of tokens that share a scale, for each --fp8-recipe that scales in blocks.
BLOCKS: Mapping[str, int] = MappingProxyType({"mxfp8": 32, "blockwise": 128})


def _rows(table: str) -> tuple[Unsupported, ...]:
    """Blocks of features, one a line, are followed by their reason and way out, indented or behind a bar."""
    blocks = re.findall(r"((?:^\S.*\n)+)((?:^ .*\n)+)", dedent(table).replace(" | ", "\n "), re.MULTILINE)
    sentences = [(features.splitlines(), " ".join(text.split()).split("; ")) for features, text in blocks]
    return tuple(Unsupported(feature, *sentence) for features, sentence in sentences for feature in features)


UNSUPPORTED: Mapping[Use, tuple[Unsupported, ...]] = {
    Use.EVERY_RUN: _rows("""
        --mtp-num-layers with tied embeddings and --pipeline-model-parallel-size above 1 and --save
        --mtp-num-layers with tied embeddings and --pipeline-model-parallel-size above 1 and --load
            has two weights of one name in Megatron's checkpoints; add --untie-embeddings-and-output-weights
        --pipeline-model-parallel-layout with copies of the embedding in several chunks of a rank
            leaves ranks that wait for one another in Megatron, or copies that differ;
            lay out multi-token prediction on the stage of the loss, or on a rank without embedding and tied output
        --full-validation without --multiple-validation-sets
            ends in an error in Megatron's first evaluation; add --multiple-validation-sets
        --full-validation with --eval-micro-batch-size above 1 and --pipeline-model-parallel-size above 1
            reads one sequence at a time in Megatron, whatever the size of a micro-batch between stages;
            use --eval-micro-batch-size 1
    """),
    Use.MEGATRONS_OWN: _rows("""
        --pipeline-placement v | is not for Megatron's own schedules; add --pipeline-schedule auto
        --recompute-keeps-attention
        --offload-activations
            is not for Megatron's own schedules; add --sequence-splits or --pipeline-schedule 1f1b
        --partition-state | is not for Megatron's own schedules; add --pipeline-schedule breadth-first
        --pipeline-trace with --overlap-moe-expert-parallel-comm
            times forwards and backwards, which then run at once; drop one of the two
    """),
    Use.ANY_SCHEDULE: _rows("""
        --cuda-graph-impl | follows the order of Megatron's own schedules; use --cuda-graph-impl none
        --overlap-moe-expert-parallel-comm
        --delay-wgrad-compute
        --moe-paged-stash
        --hybrid-context-parallel
            follows the order of Megatron's own schedules; drop --pipeline-schedule and --sequence-splits to run those
        --fine-grained-activation-offloading | follows the order of Megatron's own schedules; use --offload-activations
        --defer-embedding-wgrad-compute
            pairs activations and gradients in forward order, but segments go backward in reverse; drop it
        --cpu-offloading-num-layers
            keeps one forward until its backward, and the next would take its place; use --offload-activations
        --inprocess-restart
            trains again in a process whose pipeline has failed; drop it, and let torchrun or Slurm start the job again
        --tensor-parallel-num-weight-shards above --tensor-model-parallel-size
        --expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size
        --use-megatron-fsdp
        --use-torch-fsdp2
            is not tested with our schedules; drop --pipeline-schedule and --sequence-splits to run Megatron's own
        --pipeline-schedule-file with --pipeline-schedule | is a whole schedule; drop one of the two
        --pipeline-schedule-file with --step-batch-size-schedule
            is for one number of micro-batches; drop one of the two
        --recompute-keeps-attention without --recompute-granularity full
            is of no use, since no whole layer is repeated; add that, or drop it
    """),
    Use.SEGMENTS: _rows("""
        --context-parallel-size above 1 with --cp-comm-type other than a2a, all_gather
            moves the keys and values of the whole prefix for every segment;
            use --cp-comm-type a2a, or all_gather where there are more ranks than attention heads
        --cp-comm-type a2a with unequal numbers of attention heads
            cannot divide those of a tensor-parallel rank by --context-parallel-size; use --cp-comm-type all_gather
        --moe-expert-capacity-factor
        --moe-expert-rank-capacity-factor
            makes the experts of a token depend on the tokens beside it, which a segment changes; drop it
        --moe-router-load-balancing-type sinkhorn, quantile_balancing
            makes the experts of a token depend on the tokens beside it, which a segment changes;
            use --moe-router-load-balancing-type aux_loss
        --moe-enable-routing-replay | replays the routes of whole micro-batches; drop it
        --mtp-use-repeated-layer
            runs one layer several times on the same segment, so that its keys would overwrite one another; drop it
        --experimental-attention-variant
        --heterogeneous-layers-config-path
            is not cut into segments yet; drop --sequence-splits to keep sequences whole
        --position-embedding-type mrope | is not cut into segments yet; use --position-embedding-type rope
        --recompute-granularity selective with --recompute-modules gdn_norm_out
            is not cut into segments yet; use --recompute-granularity full, or drop it
        --recompute-granularity selective with --recompute-modules mlp and biases
            never ends its first backward in Megatron, since a bias that a recomputed part returns becomes its result;
            add --disable-bias-linear
        --hybrid-layer-pattern with D (sparse attention)
            chooses among the keys of whole sequences; use * for attention
        --window-size with tokens after the query
            lets a segment attend to later ones, which have not been computed; give 0 as its second number
        --allow-ambiguous-pad-tokens with --reset-attention-mask
            erases the tokens that end documents where padding is the same token; drop --allow-ambiguous-pad-tokens
        --logits-save-dir
        --save-tokens-per-expert-interval
        --moe-routing-trace-path
            takes every forward for a micro-batch; drop it, or --sequence-splits
        --save-activations-interval
        --save-dgrads-interval
            keeps what every module did last, which is one segment; drop it
        --qk-clip
        --log-max-attention-logit
            needs the largest logit of each head, which takes another product of all queries and keys; drop it
        --fp8-format with --fp8-recipe other than mxfp8, blockwise
        --te-precision-config-file
        quant_recipe
        kitchen_config_file
        a recipe of kitchen
            may scale by the largest value of whole tensors, but a segment has only a part;
            use --fp8-recipe mxfp8 or blockwise, whose scales are those of a few tokens
        --fp8-format with --context-parallel-size above 1
        --fp8-format with --num-experts
            scales tokens together that lie in different segments; drop --fp8-format
        fp8_dot_product_attention
        fp8_multi_head_attention
            computes attention in 8 bits, which the kernels for segments cannot; drop it
        --fp4-format | scales by the largest value of a micro-batch, too; use --fp8-format
        --attention-backend fused with --attention-dropout and --window-size on a GPU
        --attention-backend fused with --attention-dropout and packed documents on a GPU
            has no kernel in Transformer Engine; drop --attention-dropout, or use --attention-backend flash
        --attention-backend fused on this GPU without Transformer Engine 2.20 or later
            needs it; install transformer-engine, or use --attention-backend flash
        --moe-flex-dispatcher-backend hybridep with packed documents without --moe-hybridep-pad-uneven-dispatch-inputs
            needs equally many tokens on every rank, but each cuts its segments by its own documents;
            give that flag, or use deepep
        --hybrid-layer-pattern with G on this Hopper GPU and flash-linear-attention before 0.5 and Triton 3.4.0 to 3.7.0
            has wrong gradients;
            install flash-linear-attention 0.5.2 or later, with Triton 3.7.1 or later or with tilelang
        --hybrid-layer-pattern with M on this GPU without mamba-ssm, causal-conv1d
            needs their kernels; install mamba-ssm and causal-conv1d
    """),
    Use.SPLIT_BACKWARDS: _rows("""
        --moe-grouped-gemm with biases and --transformer-impl transformer_engine
            computes the gradients of biases sometimes with those of weights, sometimes with those of inputs;
            give --disable-bias-linear, or use a schedule without W such as 1f1b
        --moe-shared-expert-overlap
            computes shared experts on a stream of their own, and nothing would wait for their weight gradients; drop it
        --overlap-dispatch-backward-with-experts-wgrad
            computes weight gradients in the backward of inputs; drop it, or use a schedule without W such as 1f1b
        --tp-comm-overlap
            exchanges beside the products of weight gradients, which are computed later;
            drop it, or use a schedule without W such as 1f1b
    """),
    Use.V_CHUNKS: _rows("""
        --pipeline-model-parallel-layout with multi-token prediction before the loss
            keeps a second embedding on a rank of its own; lay them out on one stage, or use --pipeline-placement looped
        --ckpt-format torch | keeps chunks by the rank that holds them; use --ckpt-format torch_dist
    """),
    Use.OFFLOAD: _rows("""
        --overlap-grad-reduce with fused gradient accumulation
            needs marks of parameters, which autograd does not give back where activations move;
            give --no-gradient-accumulation-fusion
    """),
    Use.PARTITIONED_STATE: _rows("""
        a run without --use-distributed-optimizer
            keeps the state of the optimizer whole; add --use-distributed-optimizer
        --num-distributed-optimizer-instances above 1 | reduces gradients once more among the instances; drop it
        --optimizer other than adam, sgd | keeps parameters in an order of its own; use --optimizer adam
        --use-precision-aware-optimizer
        --optimizer-cpu-offload
            holds weights of its own that the shares do not follow yet; drop it
        --overlap-param-gather-with-optimizer-step | gathers before a chunk is at work; drop it
        --fp8-param-gather
        --fp4-param-gather
            keeps weights in few bits, which are not divided into shares yet; drop it
        --use-nccl-ub | registers buffers, which then cannot be freed; drop it
        --optimizer-cuda-graph | replays one step in memory that the next has freed; drop it
        --ddp-param-name-patterns-for-fp32-local-accumulation
            sums gradients in memory of its own, which is not divided into shares yet; drop it
        --save-wgrads-interval | reads gradients when none are whole; drop it
        --save-params-interval
        --moe-routing-trace-dump-weights
        --log-params-norm
        --check-weight-hash-across-dp-replicas-interval
            reads weights when none are gathered; drop it
        --ckpt-format other than torch_dist
            saves weights on some ranks only, and these would wait for the others; use --ckpt-format torch_dist
    """),
    Use.SEGMENTS_OF_TOKENS: _rows("""
        --sequence-splits
        --sequence-split-file
        --sequence-split-strategy
        --sequence-split-profile
        --unit-tokens
            cuts by another rule; drop one of the two
        --pipeline-schedule-file
            is an order for one number of segments, and each micro-batch has its own; use --pipeline-schedule 1f1b
        --tp-comm-overlap | has buffers for segments of one length; drop it, or take --sequence-splits
        --moe-token-dispatcher-type allgather with --expert-model-parallel-size above 1
            needs equally many tokens on every rank, but segments differ in length;
            use --moe-token-dispatcher-type alltoall
    """),
    Use.UNITS: _rows("""
        --sequence-splits
        --sequence-split-file
        --sequence-split-strategy
        --sequence-split-profile
            is for sequences of one length, and --unit-tokens decides by itself where to cut; drop one of the two
        --pipeline-schedule auto
        --pipeline-schedule-file
            is an order for one number of segments, and units give each step another; use --pipeline-schedule 1f1b
        a run without packed documents
            has sequences of one length;
            add --sft, --reset-attention-mask or --dataloader-inter-document-masking, or take --sequence-splits
        a run without --calculate-per-token-loss
            weighs a token by its micro-batch, which units change; add --calculate-per-token-loss
        --mtp-num-layers
            weighs predictions by their micro-batch, which units change; take --sequence-splits instead of --unit-tokens
        --micro-batch-size above 1
        --eval-micro-batch-size above 1
            puts several sequences side by side, where units put them one after the other; give 1
        --tp-comm-overlap | has buffers for segments of one length, which units do not have; drop it
        --moe-token-dispatcher-type allgather with --expert-model-parallel-size above 1
            needs equally many tokens on every rank, but units differ in length;
            use --moe-token-dispatcher-type alltoall
        --moe-router-load-balancing-type global_aux_loss
            waits in each forward for one of every replica, but units give replicas unequal numbers of them;
            use --moe-router-load-balancing-type aux_loss
    """),
}


def unsupported(settings: Settings, uses: Collection[Use]) -> Iterator[Unsupported]:
    """The features in `settings` that do not go with these uses."""
    return (row for use in Use if use in uses for row in UNSUPPORTED[use] if row.holds(settings))


def first_unsupported(settings: Settings, uses: Collection[Use]) -> str | None:
    """One sentence, without its full stop, on the first feature that is not supported; None if all are."""
    row = next(unsupported(settings, uses), None)
    return row and f"{row.feature} {row.because}; {row.way_out}"
