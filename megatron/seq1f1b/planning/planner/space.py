"""A question to the planner, and all that Megatron's rules and ours allow as an answer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from ...errors import ParameterError
from ...partition import SegmentTime, Task, cut_sequence, segment_multiple
from ...schedule import FAMILY_NAMES, Placement
from ..costs import A100, ModelShape, StageCost, analytic_costs, authors_flops, bottleneck_time
from ..costs.machine import OUTSIDE_GIB, Machine
from ..costs.training_setup import TrainingSetup

# GPipe takes as long as 1F1B, in more memory.
_FAMILIES = tuple(name for name in FAMILY_NAMES if name != "gpipe")


@dataclass(frozen=True)
class Question:
    """A model, a number of devices of a machine, a length in tokens and a batch in sequences.

    `memory_gib` is what the allocator may take; None: what a device has, less what lies outside the allocator. The
    tuples are the choices that the search has; `auto` is tried on the winners of the named families.
    """

    model: ModelShape
    machine: Machine
    num_devices: int
    sequence_length: int
    global_batch_size: int
    memory_gib: float | None = None
    families: tuple[str, ...] = _FAMILIES
    strategies: tuple[str, ...] = ("even", "uniform_comp", "balanced")
    segments: tuple[int, ...] = (1, 2, 4, 8, 16)
    chunks: tuple[int, ...] = (1, 2, 4)
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    recomputes: tuple[str, ...] = ("none", "full")

    @property
    def memory_limit(self) -> float:
        """What the allocator may take, in GiB."""
        return self.machine.device.memory_gib - OUTSIDE_GIB if self.memory_gib is None else self.memory_gib


@dataclass(frozen=True)
class Candidate:
    """A set-up, with the name of the strategy that cut its sequences."""

    setup: TrainingSetup
    strategy: str = "even"


def candidates(question: Question) -> Iterator[Candidate]:
    """All candidates, whether they fit or not."""
    for setup in setups(question):
        yield from scheduled(question, setup)


def setups(question: Question) -> Iterator[TrainingSetup]:
    """What `scheduled` makes candidates of: all that does not depend on the schedule, on whole sequences.

    Tensor- and context-parallel sizes are powers of two and stay within a node; expert-parallel ones may leave it.
    Layers are spread evenly, or with fewer on the stages of the embedding and of the head.
    """
    for tensor, context, pipeline, data in layouts(question):
        for chunks in question.chunks:
            for layers in spreads(question.model, pipeline, chunks):
                for micro_batch in question.micro_batches:
                    microbatches, rest = divmod(question.global_batch_size, data * micro_batch)
                    if rest:
                        continue
                    setup = TrainingSetup(
                        model=question.model,
                        sequence_length=question.sequence_length,
                        num_microbatches=microbatches,
                        micro_batch_size=micro_batch,
                        tensor_parallel=tensor,
                        context_parallel=context,
                        data_parallel=data,
                        placement=Placement(pipeline, chunks),
                        layers_per_stage=layers,
                        sequence_parallel=tensor > 1,
                        distributed_optimizer=True,
                        overlaps_data_parallel=data * context > 1,
                    )
                    for expert in expert_sizes(question.model, tensor * context * data):
                        for recompute in question.recomputes:
                            yield replace(setup, expert_parallel=expert, recompute=recompute)


def expert_sizes(model: ModelShape, ranks: int) -> list[int]:
    """How many of the ranks of a pipeline rank may share the experts: powers of two."""
    if model.experts is None:
        return [1]
    return [size for size in powers_of_two(ranks) if ranks % size == 0 and model.experts.total % size == 0]


def layouts(question: Question) -> Iterator[tuple[int, int, int, int]]:
    """Sizes of tensor, context, pipeline and data parallelism that divide what they must."""
    model, devices, per_node = question.model, question.num_devices, question.machine.devices_per_node
    kv_heads = model.num_kv_heads or model.num_heads
    for tensor in powers_of_two(per_node):
        if kv_heads % tensor or model.num_heads % tensor or question.sequence_length % tensor:
            continue
        for context in powers_of_two(per_node // tensor):
            # By heads (--cp-comm-type a2a); Megatron gives every rank two parts of a sequence.
            if context > 1 and (kv_heads % (tensor * context) or question.sequence_length % (2 * tensor * context)):
                continue
            ranks, rest = divmod(devices, tensor * context)
            for pipeline in range(1, min(ranks, model.num_layers) + 1):
                data, left = divmod(ranks, pipeline)
                if not (rest or left or question.global_batch_size % data):
                    yield tensor, context, pipeline, data


def spreads(model: ModelShape, pipeline: int, chunks: int) -> list[tuple[int, ...]]:
    """Layers of the stages: even ones, and those that make room for the head on the last stage.

    Megatron takes other numbers on the first and the last rank (--decoder-first-pipeline-num-layers).
    """
    stages, layers = pipeline * chunks, model.num_layers
    even = [(layers // stages,) * stages] if layers % stages == 0 else []
    if pipeline == 1 and chunks > 1:
        return []
    if chunks > 1 or pipeline < 2:
        return even
    found = even
    for middle in (ceil(layers / pipeline), ceil(layers / pipeline) + 1):
        ends = layers - (pipeline - 2) * middle
        for last in range(max(1, middle - 3), middle):
            first = ends - last
            if 1 <= first <= middle and (spread := (first, *(middle,) * (pipeline - 2), last)) not in found:
                found.append(spread)
    return found


def scheduled(question: Question, setup: TrainingSetup) -> Iterator[Candidate]:
    """The set-up under every schedule, with every way to cut its sequences."""
    if setup.pipeline_parallel == 1:
        yield Candidate(setup)
        return
    for family in question.families:
        if family == "auto":  # takes its turn on the winners of the others
            continue
        named = replace(setup, family=family)
        # Splitting undoes recomputation: W keeps nearly as much. The W of grouped products of experts has no cost here.
        if named.splits_backward and (setup.recompute == "full" or setup.model.experts):
            continue
        # With one chunk a rank it is GPipe.
        if family == "breadth-first" and setup.placement.num_chunks == 1:
            continue
        for segments in question.segments:
            if segments == 1:
                yield Candidate(named)
            else:
                seen = set()
                for strategy in question.strategies:
                    lengths = cut(named, strategy, segments)
                    if lengths is not None and lengths not in seen:
                        seen.add(lengths)
                        yield Candidate(replace(named, segments=lengths), strategy)


def cut(setup: TrainingSetup, strategy: str, segments: int) -> tuple[int, ...] | None:
    """The lengths that training would have with these flags; None where a sequence is too short."""
    time = _slowest_stage(stage_costs(setup)) if strategy == "balanced" else None
    multiple = segment_multiple(setup.token_shares, setup.context_parallel)
    return _cut(setup.model, setup.sequence_length, multiple, strategy, segments, time)


def stage_costs(setup: TrainingSetup) -> tuple[StageCost, ...]:
    """What training cuts and plans by, whatever the machine: see `arguments/sequence_partition`."""
    devices = setup.tensor_parallel / setup.micro_batch_size
    return _stage_costs(setup.model, setup.layers_per_stage, devices, setup.recompute == "full")


# Equal costs give the same function, by which `_cut` caches lengths.
_slowest_stage = lru_cache(maxsize=1024)(bottleneck_time)


@lru_cache(maxsize=4096)
def _cut(
    model: ModelShape, length: int, multiple: int, strategy: str, segments: int, time: SegmentTime | None
) -> tuple[int, ...] | None:
    try:
        return cut_sequence(
            strategy,
            Task(
                length, segments, multiple, time=time, flops=authors_flops(model), full_speed_rows=A100.full_speed_rows
            ),
        )
    except ParameterError:
        return None


@lru_cache(maxsize=1024)
def _stage_costs(model: ModelShape, layers: tuple[int, ...], devices: float, recomputes: bool) -> tuple[StageCost, ...]:
    return analytic_costs(model, layers, A100.times(devices), recomputes)


def powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(max(most, 1).bit_length())]
