"""The flags of a launch of Megatron, read and written without Megatron: those that a planner decides, and the rest."""

import argparse
import csv
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from ..arguments.flags import EQUAL_SPLITS, share_or_auto
from ..costs.context_exchange import comm_type_of_segments
from ..costs.training_setup import ALL_BUT_ATTENTION, Fsdp, Moves, TrainingSetup
from ..partition import DEFAULT_STRATEGY, STRATEGIES
from ..planner.launch_candidate import NOT_PREDICTED
from ..planner.space import Candidate
from ..process.flag_names import flag_of
from ..schedule import FAMILY_NAMES
from .model_flags import add_every_model_flag
from .parsing import Parser, count, name_of, values_of, with_values

# The modules of attention for --offload-modules, its norm included.
_OF_ATTENTION = "attn_norm qkv_linear core_attn attn_proj"
# Megatron's modules for CUDA graphs, by the symbols of blocks; of experts what comes before their products.
_IN_GRAPHS = {
    "*": "attn",
    "+": "attn",
    "G": "attn",
    "M": "mamba",
    "-": "mlp",
    "E": "moe_router moe_preprocess",
}
# The flags that a plan decides.
_COUNTS = """
    seq-length micro-batch-size global-batch-size tensor-model-parallel-size pipeline-model-parallel-size
    context-parallel-size expert-model-parallel-size expert-tensor-parallel-size unit-tokens recompute-num-layers
    num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers
    decoder-last-pipeline-num-layers microbatch-group-size-per-virtual-pipeline-stage
    cpu-offloading-num-layers
"""
_SWITCHES = """
    sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather partition-state keep-logits
    recompute-activations recompute-keeps-attention fine-grained-activation-offloading tp-comm-overlap
    overlap-moe-expert-parallel-comm use-megatron-fsdp account-for-embedding-in-pipeline-split
    account-for-loss-in-pipeline-split
"""


def read_launch(words: Sequence[str], preset: Sequence[str] = ()) -> argparse.Namespace:
    """Read the flags of a launch, behind those of a preset; a flag that is not given is None.

    `passed_through` has those that a plan leaves as they are, each with its values; `unread` those of the launch that
    change no prediction; `of_model` the names of those of the launch that belong to a model.
    """
    parser = launch_parser()
    read = set(parser.flags)
    of_model = set(_model_parser().flags)
    launch = parser.parse_known_args([*preset, *words])[0]
    if launch.recompute_activations:  # as Megatron does
        launch.recompute_granularity = "selective"
    given = with_values(words)
    launch.unread = [flag for flag in given if name_of(flag) not in read]
    launch.of_model = [name for name in map(name_of, given) if name in of_model]
    decided = read - of_model
    if launch.use_megatron_fsdp:
        decided.add("--ckpt-format")  # that of its checkpoints, which no other run may have
    launch.passed_through = [flag for flag in with_values([*preset, *words]) if name_of(flag) not in decided]
    # Predictions are for an exchange of all experts with all.
    is_flex = "--moe-token-dispatcher-type flex" in given or "--moe-token-dispatcher-type=flex" in given
    launch.moe_token_dispatcher_type = "flex" if is_flex else "alltoall"
    if launch.num_experts and not is_flex:
        launch.passed_through.append("--moe-token-dispatcher-type alltoall")
    return launch


@cache
def megatron_values() -> Mapping[str, float]:
    """How many values each flag of Megatron takes at most, known without Megatron; tools/upstream_flags.py lists them.
    Flags of another version than the installed one may have any number."""
    with Path(__file__).with_name("megatron_flags.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    return MappingProxyType({row["flag"]: values_of(row["values"] or "*") for row in rows})


def launch_parser() -> Parser:
    """The flags of a launch that a prediction reads."""
    parser = _model_parser()
    _add_decided(parser)
    return parser


def _model_parser() -> Parser:
    parser = Parser(None, add_help=False)
    add_every_model_flag(parser)
    return parser


def _add_decided(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name in _COUNTS.split():
        add(f"--{name}", type=count)
    for name in _SWITCHES.split():
        add(f"--{name}", action="store_true")
    for name in (
        *NOT_PREDICTED,
        "recompute_method",
        "pipeline_model_parallel_layout",
        "data_parallel_sharding_strategy",
        "megatron_fsdp_main_grads_dtype",
        "megatron_fsdp_grad_comm_dtype",
        "cuda_graph_impl",
    ):
        add(flag_of(name))
    add("--pipeline-schedule", choices=sorted(FAMILY_NAMES))
    add("--sequence-splits", *EQUAL_SPLITS, type=count)
    add("--sequence-split-strategy", "--pipe-sp-strategy", choices=sorted(STRATEGIES), default=DEFAULT_STRATEGY)
    add("--recompute-granularity", choices=("full", "selective"))
    add("--recompute-modules", nargs="+")
    add("--cuda-graph-modules", "--cuda-graph-scope", nargs="*")
    add("--offload-modules", nargs="+")
    add("--offload-activations", type=share_or_auto, default=0.0)
    add("--offload-layers-leaving", type=int, default=0)
    add("--activation-offload-fraction", type=float, default=1.0)
    add("--cp-comm-type", nargs="+", choices=("p2p", "all_gather", "a2a", "a2a+p2p"), default=("p2p",))
    add("--hierarchical-context-parallel-sizes", type=count, nargs="+", default=[])


def decided_flags(candidate: Candidate, by_megatron: bool = False) -> list[str]:
    """The flags that the planner decides, one an item, with its values; none of this package with `by_megatron`."""
    setup = candidate.setup
    flags = [
        f"--seq-length {setup.sequence_length}",
        f"--tensor-model-parallel-size {setup.tensor_parallel}",
        f"--pipeline-model-parallel-size {setup.pipeline_parallel}",
        f"--micro-batch-size {setup.micro_batch_size}",
        f"--global-batch-size {setup.global_batch_size}",
        "--use-distributed-optimizer",
    ]
    flags += [*_replicas(setup), *_exchanges(setup), *_memory(setup), *_graphs(setup), *_layout(setup, by_megatron)]
    if not by_megatron:
        flags.append(f"--pipeline-schedule {setup.family}")
        if setup.keeps_logits:
            flags.append("--keep-logits")
    segments = len(setup.segments)
    if candidate.unit_tokens is not None:
        flags += [f"--unit-tokens {candidate.unit_tokens}", "--calculate-per-token-loss"]
    elif segments > 1:
        flags += [f"--sequence-splits {segments}", f"--sequence-split-strategy {candidate.strategy}"]
    return flags


def _replicas(setup: TrainingSetup) -> Iterator[str]:
    """What replicas divide among themselves, and send beside compute."""
    if setup.overlaps_data_parallel:
        yield "--overlap-grad-reduce"
        yield "--overlap-param-gather"
    if setup.partitions_state:
        yield "--partition-state"
    if setup.fsdp is not Fsdp.OFF:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {setup.fsdp}"
        yield "--megatron-fsdp-main-grads-dtype fp32"
        yield "--megatron-fsdp-grad-comm-dtype bf16"
        yield "--ckpt-format fsdp_dtensor"
        yield "--no-gradient-accumulation-fusion"


def _exchanges(setup: TrainingSetup) -> Iterator[str]:
    """What ranks exchange within a layer."""
    if setup.sequence_parallel:
        yield "--sequence-parallel"
        if setup.hides_tensor_exchange:
            yield "--tp-comm-overlap"
    if setup.context_parallel > 1:
        exchange, *sizes = (setup.cp_comm_type or comm_type_of_segments(setup)).split()
        yield f"--context-parallel-size {setup.context_parallel}"
        yield f"--cp-comm-type {exchange}"
        if sizes:
            yield f"--hierarchical-context-parallel-sizes {' '.join(sizes)}"
    if setup.model.experts:
        yield f"--expert-model-parallel-size {setup.expert_parallel}"
        yield "--expert-tensor-parallel-size 1"
    if setup.hides_experts:
        yield "--overlap-moe-expert-parallel-comm"


def _memory(setup: TrainingSetup) -> Iterator[str]:
    """What is computed again, and what waits in the memory of the host."""
    if setup.recomputes_layers or setup.recomputed_share < 1:
        yield "--recompute-granularity full"
        if setup.recomputed_share < 1:
            yield "--recompute-method block"
            yield f"--recompute-num-layers {round(setup.recomputed_share * max(setup.layers_per_stage))}"
        else:
            yield "--recompute-method uniform"
            yield "--recompute-num-layers 1"
            if setup.recompute == ALL_BUT_ATTENTION:
                yield "--recompute-keeps-attention"
    elif setup.recompute != "none":
        yield "--recompute-granularity selective"
        yield f"--recompute-modules {setup.recompute}"
    if not setup.offloads:
        return
    if setup.moves is Moves.MODULES:
        modules = f"{_OF_ATTENTION} mlp_norm"
        if setup.model.experts is not None and not setup.repeats("E"):
            modules += " expert_fc1 moe_act"
        yield "--fine-grained-activation-offloading"
        yield f"--offload-modules {modules}"
        yield f"--activation-offload-fraction {setup.offloads:g}"
    elif setup.moves is Moves.LAYERS:
        yield f"--cpu-offloading-num-layers {round(setup.offloads * setup.model.num_layers)}"
    else:
        yield f"--offload-activations {setup.offloads:g}"
        if setup.moves_by_layer:
            yield f"--offload-layers-leaving {setup.layers_leaving}"
        if setup.overlaps_data_parallel:
            yield "--no-gradient-accumulation-fusion"


def _graphs(setup: TrainingSetup) -> Iterator[str]:
    """The CUDA graphs of all parts of layers but experts."""
    if not setup.replays_layers:
        return
    model = setup.model
    modules = dict.fromkeys(_IN_GRAPHS[symbol] for layer in range(model.num_layers) for symbol in model.blocks(layer))
    yield "--cuda-graph-impl transformer_engine"
    yield f"--cuda-graph-modules {' '.join(modules)}"


def _layout(setup: TrainingSetup, by_megatron: bool) -> Iterator[str]:
    """How layers are spread over stages, unless each rank has one equal part; groups of Megatron's micro-batches."""
    ranks = setup.pipeline_parallel
    chunks = setup.placement.num_chunks
    microbatches = setup.num_microbatches
    layers = setup.layers_per_stage
    pattern = setup.model.pattern
    if pattern is not None:
        symbols = iter(pattern)
        stages = ("".join(islice(symbols, count)) for count in layers)
        yield f"--hybrid-layer-pattern {shlex.quote('|'.join(stages))}"
    elif len(set(layers)) > 1:
        text = "|".join("t" * count for count in layers) + "m" * setup.model.prediction_depth
        yield f"--pipeline-model-parallel-layout {shlex.quote(f'E{text}L')}"
    elif chunks > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {chunks}"
    # Megatron refuses a last group of fewer micro-batches than there are ranks.
    if by_megatron and chunks > 1 and microbatches % ranks:
        sizes = range(ranks + 1, microbatches + 1)
        size = next(size for size in sizes if not 0 < microbatches % size < ranks)
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {size}"
