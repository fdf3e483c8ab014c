"""The flags of a launch of Megatron, read without Megatron: those that a planner needs, and those that it decides."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from ..partition import DEFAULT_STRATEGY, STRATEGIES
from ..planning.costs import Experts, ModelShape
from ..planning.costs.training_setup import Software, TrainingSetup, even_layers
from ..planning.planner import Candidate, Question
from ..planning.planner.space import cut, expert_sizes
from ..schedule import FAMILY_NAMES, Placement
from .model_flags import model_shape
from .parsing import Parser, count

# What the formulas of time and memory do not cover.
_NOT_PREDICTED = ("--multi-latent-attention", "--hybrid-layer-pattern", "--window-size", "--mtp-num-layers")


def read_launch(words: Sequence[str]) -> argparse.Namespace:
    """Read the flags of a launch. Unknown flags are passed over; a flag that is not given is None."""
    parser = Parser(None, allow_abbrev=False, add_help=False)
    _add_model(parser)
    _add_decided(parser)
    return parser.parse_known_args(words)[0]


def undecided(words: Sequence[str]) -> list[str]:
    """The flags of a launch without those that a planner decides, each with its values."""
    parser = Parser(None, allow_abbrev=False, add_help=False)
    _add_decided(parser)
    flags: list[str] = []
    for word in parser.parse_known_args(words)[1]:
        if word.startswith("--") or not flags:
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    return flags


def model_of(launch: argparse.Namespace) -> ModelShape:
    """The model of a launch. Raises ValueError if a size is missing, or sizes do not divide."""
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if getattr(launch, name) is None]
    if missing:
        raise ValueError(f"--{missing[0].replace('_', '-')} is missing: give the sizes of the model, or --model")
    for flag in _NOT_PREDICTED:
        if getattr(launch, flag[2:].replace("-", "_")):
            raise ValueError(f"{flag} has no cost in the planner; drop it here, or rehearse the launch (--dry-run)")
    if not launch.group_query_attention:
        launch.num_query_groups = None
    model = model_shape(launch)
    if launch.num_experts is None:
        return model
    experts = Experts(
        total=launch.num_experts,
        active=launch.moe_router_topk,
        ffn_hidden_size=launch.moe_ffn_hidden_size or model.ffn_hidden_size,
        shared_ffn_hidden_size=launch.moe_shared_expert_intermediate_size or 0,
    )
    layers = range(model.num_layers)
    frequency = launch.moe_layer_freq
    sparse = [not layer % frequency for layer in layers] if isinstance(frequency, int) else frequency
    if len(sparse) != model.num_layers:
        raise ValueError(f"--moe-layer-freq has {len(sparse)} entries, --num-layers is {model.num_layers}")
    return replace(model, experts=experts, expert_layers=tuple(layer for layer in layers if sparse[layer]))


def as_given(launch: argparse.Namespace, question: Question) -> Candidate | None:
    """The configuration of the launch itself; None if it names no parallel sizes. Raises ValueError for wrong ones."""
    tensor, pipeline = launch.tensor_model_parallel_size, launch.pipeline_model_parallel_size
    if tensor is None and pipeline is None:
        return None
    tensor, pipeline, context = tensor or 1, pipeline or 1, launch.context_parallel_size or 1
    micro_batch = launch.micro_batch_size or 1
    data, rest = divmod(question.num_devices, tensor * pipeline * context)
    microbatches, left = divmod(question.global_batch_size, max(data, 1) * micro_batch)
    expert = launch.expert_model_parallel_size or 1
    if expert > 1 and (
        question.model.experts is None or expert not in expert_sizes(question.model, tensor * context * data)
    ):
        raise ValueError(
            f"--expert-model-parallel-size {expert} does not divide the experts and the {tensor * context * data} "
            "ranks of a pipeline stage; drop it to have it chosen"
        )
    if rest or left:
        raise ValueError(
            f"--tensor-model-parallel-size {tensor}, --pipeline-model-parallel-size {pipeline} and "
            f"--micro-batch-size {micro_batch} do not divide --gpus {question.num_devices} and --global-batch-size "
            f"{question.global_batch_size}; drop them to have them chosen"
        )
    placement = Placement(pipeline, _chunks(launch, pipeline))
    setup = TrainingSetup(
        model=question.model,
        sequence_length=question.sequence_length,
        num_microbatches=microbatches,
        micro_batch_size=micro_batch,
        tensor_parallel=tensor,
        context_parallel=context,
        expert_parallel=expert,
        data_parallel=data,
        placement=placement,
        family=launch.pipeline_schedule or "1f1b",
        layers_per_stage=_layers(launch, placement),
        sequence_parallel=launch.sequence_parallel,
        recompute=launch.recompute_granularity or "none",
        distributed_optimizer=launch.use_distributed_optimizer,
        software=Software(overlaps_data_parallel=launch.overlap_grad_reduce),
    )
    strategy, segments = launch.sequence_split_strategy, launch.sequence_splits or 1
    if segments == 1:
        return Candidate(setup)
    lengths = cut(setup, strategy, segments)
    if lengths is None:
        raise ValueError(f"--sequence-splits {segments} are too many for --seq-length {question.sequence_length}")
    return Candidate(replace(setup, segments=lengths), strategy)


def _chunks(launch: argparse.Namespace, pipeline: int) -> int:
    if launch.num_layers_per_virtual_pipeline_stage is not None and launch.num_layers is not None:
        return max(1, launch.num_layers // pipeline // launch.num_layers_per_virtual_pipeline_stage)
    return launch.num_virtual_stages_per_pipeline_rank or 1


def _layers(launch: argparse.Namespace, placement: Placement) -> tuple[int, ...]:
    """Empty for an even spread, as a TrainingSetup has it."""
    first, last = launch.decoder_first_pipeline_num_layers, launch.decoder_last_pipeline_num_layers
    if placement.num_chunks > 1 or launch.num_layers is None or first is last is None:
        return ()
    before, after = [] if first is None else [first], [] if last is None else [last]
    middle = placement.num_ranks - len(before) - len(after)
    rest = launch.num_layers - sum(before) - sum(after)
    return (*before, *(even_layers(rest, middle) if middle else ()), *after)


def _add_model(parser: argparse.ArgumentParser) -> None:
    for name in ("num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size", "kv-channels"):
        parser.add_argument(f"--{name}", type=count)
    parser.add_argument("--num-query-groups", type=count)
    parser.add_argument("--vocab-size", type=count, default=51200)
    for name in ("num-experts", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "mtp-num-layers"):
        parser.add_argument(f"--{name}", type=count)
    parser.add_argument("--moe-router-topk", type=count, default=2)
    parser.add_argument("--moe-layer-freq", type=_layer_frequency, default=1)
    for name in ("hybrid-layer-pattern", "window-size"):
        parser.add_argument(f"--{name}")
    for name in ("group-query-attention", "swiglu", "multi-latent-attention"):
        parser.add_argument(f"--{name}", action="store_true")


def _layer_frequency(text: str) -> int | list[int]:
    """Every so many layers, or a list of 0 and 1 as Megatron's parser takes it: [0,1,1] or [0]*1+[1]*2."""
    if text.isdigit() and int(text):
        return int(text)
    found: list[int] = []
    for part in text.strip().removeprefix("(").removesuffix(")").split("+"):
        entries, _, times = part.strip().partition("*")
        try:
            numbers = [int(number) for number in entries.strip().removeprefix("[").removesuffix("]").split(",")]
            found += numbers * int(times or 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a list such as [0]*1+[1]*47") from None
    return found


def _add_decided(parser: argparse.ArgumentParser) -> None:
    for name in (
        "seq-length",
        "global-batch-size",
        "micro-batch-size",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "context-parallel-size",
        "expert-model-parallel-size",
        "expert-tensor-parallel-size",
        "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank",
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "sequence-splits",
        "recompute-num-layers",
    ):
        parser.add_argument(f"--{name}", type=count)
    parser.add_argument("--pipeline-schedule", choices=sorted(FAMILY_NAMES))
    parser.add_argument("--sequence-split-strategy", choices=sorted(STRATEGIES), default=DEFAULT_STRATEGY)
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    for name in ("recompute-method", "cp-comm-type"):
        parser.add_argument(f"--{name}")
    for name in ("sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"):
        parser.add_argument(f"--{name}", action="store_true")
