"""A question to the planner, and all that Megatron's rules and ours allow as an answer.

Tested in planner/test_search.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil
from typing import Any, NamedTuple

from ..costs.blocks import head_flops, model_flops, paper_flops
from ..costs.layer_bytes import keeps_logits
from ..costs.layer_times import fastest_cp_comm_type
from ..costs.machine import GIB, OUTSIDE_GIB, Machine
from ..costs.model_shape import ModelShape
from ..costs.stage_costs import A100, setup_pace
from ..costs.stage_times import balanced_layers, waits_for_launches
from ..costs.training_setup import ALL_BUT_ATTENTION, FULL, Fsdp, Moves, TrainingSetup, splits_backward
from ..partition import SegmentTime, Task, cut_sequence, segment_multiple
from ..schedule import FAMILY_NAMES, PAIRED, Placement

# GPipe takes as long as 1F1B, in more memory.
_FAMILIES = tuple(name for name in FAMILY_NAMES if name != "gpipe")
# Segments of fewer tokens on a rank leave a GPU waiting for its host.
_SHORTEST = 512
# So many tokens fill a GPU, whatever the model: more sequences in a micro-batch gain nothing.
_FULL = 32768
# The part of the products of a pipeline rank from which on those that are computed again can make a step longer.
_VISIBLE = 0.05
# The shares of the layers of a stage that Megatron may compute again.
_SHARES = (0.25, 0.5, 0.75, 1.0)
# So many chunks a rank has at least where its replicas keep shares of the state: two are whole while one of them runs.
_CHUNKS_OF_PARTITIONED = 3
# What a search may compute again, beside whole layers.
_SELECTIVE = ("none", "layernorm mlp", "layernorm moe_act", "layernorm mlp moe")


class ParallelSizes(NamedTuple):
    """The numbers of ranks of tensor, context, pipeline and data parallelism."""

    tensor: int
    context: int
    pipeline: int
    data: int


class MemoryBudget(NamedTuple):
    """Bytes of a device, of its host, and bytes/s between them."""

    device: float
    host: float
    bandwidth: float


@dataclass(frozen=True)
class Question:
    """A model, a number of devices of a machine, a length in tokens and a batch in sequences. The allocator may take
    `memory_gib`; None: all that a device has, less what lies outside the allocator. Activations of a device may take
    `host_gib` of the memory of its host. The tuples are the choices of the search. With `by_megatron` Megatron's own
    schedules run, not those of this package. With `partitions_state` replicas keep shares of weights and gradients;
    None: under `breadth-first`, where a configuration does not fit otherwise. With `dispatches_once` a token goes once
    to each node or rank that has some of its experts. `accepts` tells whether a configuration is allowed, whatever its
    lengths; `accepts_of_megatron` is for Megatron's own schedules."""

    model: ModelShape
    machine: Machine
    num_devices: int
    sequence_length: int
    global_batch_size: int
    memory_gib: float | None = None
    host_gib: float = 0.0
    families: tuple[str, ...] = _FAMILIES
    segments: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    chunks: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    recomputes: tuple[str, ...] = (*_SELECTIVE, ALL_BUT_ATTENTION, FULL)
    by_megatron: bool = False
    partitions_state: bool | None = False
    dispatches_once: bool = False
    accepts: "Callable[[Candidate], bool]" = lambda candidate: True
    accepts_of_megatron: "Callable[[Candidate], bool]" = lambda candidate: True

    def megatron_baseline(self) -> "Question":
        """The question for Megatron alone: 1F1B and its interleaved form on whole sequences. It keeps logits, overlaps
        the messages of tensor parallelism and of experts with compute, and moves activations of modules to the host."""
        recomputes = tuple(recompute for recompute in self.recomputes if recompute != ALL_BUT_ATTENTION)
        own: dict[str, Any] = {"families": ("1f1b",), "segments": (1,), "recomputes": recomputes, "by_megatron": True}
        return replace(self, **own, partitions_state=False, accepts=self.accepts_of_megatron)

    @property
    def memory_limit(self) -> float:
        """What the allocator may take, in GiB."""
        return self.machine.device.memory_gib - OUTSIDE_GIB if self.memory_gib is None else self.memory_gib

    @property
    def budget(self) -> MemoryBudget:
        bandwidth = self.machine.device.host_bandwidth
        return MemoryBudget(GIB * self.memory_limit, GIB * self.host_gib if bandwidth else 0.0, bandwidth)

    def setup(self, sizes: ParallelSizes, chunks: int = 1, micro_batch_size: int = 1, **choices: Any) -> TrainingSetup:
        """A set-up of whole sequences."""
        return TrainingSetup(
            self.model,
            self.sequence_length,
            self.global_batch_size // (sizes.data * micro_batch_size),
            micro_batch_size,
            sizes.tensor,
            sizes.context,
            data_parallel=sizes.data,
            placement=Placement(sizes.pipeline, chunks),
            partitions_state=bool(self.partitions_state),
            **choices,
        )

    def sharing_experts(self, setup: TrainingSetup, ranks: int) -> TrainingSetup:
        """The set-up with the experts of a pipeline rank shared by so many ranks."""
        return setup.but(expert_parallel=ranks)


@dataclass(frozen=True)
class Candidate:
    """A set-up, with the name of the strategy that cut its sequences, or the tokens of their units."""

    setup: TrainingSetup
    strategy: str = "even"
    unit_tokens: int | None = None


def setups(question: Question) -> Iterator[TrainingSetup]:
    """All set-ups without a schedule, on whole sequences."""
    for sizes in all_sizes(question):
        yield from spread(question, sizes)


def all_sizes(question: Question) -> Iterator[TrainingSetup]:
    """Parallel sizes, micro-batches and recomputation, with one chunk a rank and layers spread evenly."""
    for sizes in parallel_sizes(question):
        yield from recomputed(question, sizes)


def parallel_sizes(question: Question) -> Iterator[TrainingSetup]:
    """Parallel sizes and micro-batches, without recomputation. Any of the ranks of a pipeline stage may share the
    experts."""
    for sizes in layouts(question):
        for micro_batch in question.micro_batches:
            tokens = micro_batch * question.sequence_length / (sizes.tensor * sizes.context)  # on a rank
            is_needless = micro_batch > 1 and tokens > _FULL
            if is_needless or question.global_batch_size % (sizes.data * micro_batch):
                continue
            setup = question.setup(
                sizes,
                micro_batch_size=micro_batch,
                keeps_logits=question.by_megatron,
                sequence_parallel=sizes.tensor > 1,
                hides_tensor_exchange=sizes.tensor > 1,
                distributed_optimizer=True,
                overlaps_data_parallel=sizes.data * sizes.context > 1,
                dispatches_once=question.dispatches_once,
            )
            setup = setup.but(cp_comm_type=fastest_cp_comm_type(setup.layer_setup, question.machine))
            for expert in expert_sizes(question.model, sizes.tensor * sizes.context * sizes.data):
                yield question.sharing_experts(setup, expert)


def recomputed(question: Question, sizes: TrainingSetup, segments: int = 1) -> Iterator[TrainingSetup]:
    """The sizes with each recomputation, and with the exchange of experts hidden; of Megatron alone, also with parts of
    it, and with sharded parameters."""
    sharding = ways_to_shard(question, sizes)
    losses = ways_to_take_the_loss(sizes)
    for recompute in recomputes(question):
        # Pairs hold more units.
        hiding = (True, False) if may_hide(question, sizes, segments, recompute) else (False,)
        shares = _SHARES if question.by_megatron and recompute == FULL else (1.0,)
        for hides, share, fsdp, keeps in product(hiding, shares, sharding, losses):
            setup = sizes.but(
                recompute=recompute,
                hides_experts=hides,
                recomputed_share=share,
                fsdp=fsdp,
                keeps_logits=keeps,
            )
            yield setup.but(replays_layers=True) if should_replay(question, setup) else setup


def ways_to_shard(question: Question, sizes: TrainingSetup) -> tuple[Fsdp, ...]:
    """What replicas may shard: FSDP is for Megatron's own schedules."""
    return tuple(Fsdp) if question.by_megatron and sizes.data_group.size > 1 else (Fsdp.OFF,)


def should_replay(question: Question, setup: TrainingSetup) -> bool:
    """Whether CUDA graphs replay layers: in Megatron's own schedules, where a device would wait for its host. A graph
    of a layer cannot gather parameters (FSDP), take documents of a pack, or compute a layer or its experts again as a
    whole."""
    if not question.by_megatron or setup.fsdp is not Fsdp.OFF or setup.seen:
        return False
    if setup.recomputes_layers or setup.repeats("E"):
        return False
    return waits_for_launches(setup.layer_setup, question.machine)


def ways_to_take_the_loss(sizes: TrainingSetup) -> tuple[bool, ...]:
    """Whether logits are kept: both, where computing them in pieces, again in the backward, would take the last of the
    pipeline's ranks visibly longer than its share of all products."""
    if keeps_logits(sizes):
        return (sizes.keeps_logits,)
    again = head_flops(sizes.model) * sizes.sequence_length
    share = model_flops(sizes.model, sizes.sequence_length, batch=1) / sizes.pipeline_parallel
    return (False, True) if again > _VISIBLE * share else (False,)


def may_hide(question: Question, sizes: TrainingSetup, segments: int, recompute: str) -> bool:
    """Whether the exchange of experts may be hidden: by schedule plans, beside another unit, in no hybrid model, with
    one prediction head at most. Megatron's plans refuse to with experts that are computed again."""
    model = question.model
    if sizes.expert_parallel == 1 or model.pattern is not None or model.prediction_depth > 1:
        return False
    if must_be_partitioned(question, sizes):
        return False  # its schedule has no pairs
    if sizes.num_microbatches * segments == 1 or (question.by_megatron and "moe" in recompute.split()):
        return False
    return recompute not in (FULL, ALL_BUT_ATTENTION)


def recomputes(question: Question) -> list[str]:
    """The recomputations that this model has: `moe` and `moe_act` need experts, and with biases a backward of Megatron
    with `mlp` never ends."""
    model = question.model
    left_out = {"mlp"} if model.has_biases else set()
    if model.experts is None:
        left_out |= {"moe", "moe_act"}
    found: list[str] = []
    for recompute in question.recomputes:
        modules = [module for module in recompute.split() if module not in left_out]
        left = " ".join(modules) or "none"
        if left not in found:
            found.append(left)
    return found


def spread(question: Question, sizes: TrainingSetup) -> Iterator[TrainingSetup]:
    """The sizes with all numbers of model chunks."""
    for chunks in numbers_of_chunks(question, sizes):
        yield spread_in_chunks(question, sizes, chunks)


def numbers_of_chunks(question: Question, sizes: TrainingSetup) -> list[int]:
    """The numbers of model chunks that a rank may have."""
    ranks = sizes.pipeline_parallel
    found = []
    for chunks in question.chunks if ranks > 1 else (1,):
        # Megatron interleaves groups of at least as many micro-batches as there are ranks.
        has_group = chunks == 1 or not question.by_megatron or sizes.num_microbatches >= ranks
        # Its pairs need several chunks in a pipeline.
        has_pairs = not sizes.hides_experts or not question.by_megatron or min(ranks, 2) <= chunks
        # A partitioned state needs several, too.
        has_shares = not must_be_partitioned(question, sizes) or chunks >= _CHUNKS_OF_PARTITIONED
        if has_group and has_pairs and has_shares and ranks * chunks <= question.model.num_layers:
            found.append(chunks)
    return found


def layers_in_chunks(question: Question, sizes: TrainingSetup, chunks: int) -> tuple[int, ...]:
    """The layers of each stage, spread for the least compute of the busiest rank."""
    return balanced_layers(sizes, Placement(sizes.pipeline_parallel, chunks), question.machine)


def spread_in_chunks(question: Question, sizes: TrainingSetup, chunks: int) -> TrainingSetup:
    """The sizes with so many model chunks a rank, and layers spread over these."""
    layers = layers_in_chunks(question, sizes, chunks)
    setup = sizes.but(placement=Placement(sizes.pipeline_parallel, chunks), layers_per_stage=layers)
    if sizes.recomputed_share < 1:
        return setup.but(recomputed_share=ceil(sizes.recomputed_share * max(layers)) / max(layers))
    return setup


def expert_sizes(model: ModelShape, ranks: int) -> list[int]:
    """The numbers of ranks of a pipeline stage that may share the experts: powers of two."""
    total = 1 if model.experts is None else model.experts.total
    return [size for size in powers_of_two(ranks) if ranks % size == 0 and total % size == 0]


def layouts(question: Question) -> Iterator[ParallelSizes]:
    """All sizes that the devices, the model and the batch allow. Tensor parallelism stays within a node."""
    model = question.model
    devices = question.num_devices
    kv_heads = model.num_kv_heads or model.num_heads
    for tensor in powers_of_two(question.machine.devices_per_node):
        if kv_heads % tensor or model.num_heads % tensor or question.sequence_length % tensor:
            continue
        for context in powers_of_two(devices // tensor):
            # Megatron gives every rank two parts of a sequence.
            is_cut = question.sequence_length % (2 * tensor * context) == 0
            is_long = question.sequence_length // context >= 2 * _SHORTEST
            if context > 1 and not (is_cut and is_long):
                continue
            # The heads of recurrences are shared evenly.
            recurrences = (kind for kind in (model.delta_net, model.mamba) if kind is not None)
            if not all(kind.shared_by(tensor, context) for kind in recurrences):
                continue
            if devices % (tensor * context):
                continue
            ranks = devices // (tensor * context)
            for pipeline in range(1, min(ranks, model.num_layers) + 1):
                data, left = divmod(ranks, pipeline)
                if not left and question.global_batch_size % data == 0:
                    yield ParallelSizes(tensor, context, pipeline, data)


def families(question: Question, setup: TrainingSetup) -> list[str]:
    """The families for a set-up; `auto` is tried on the winners of the others."""
    if setup.pipeline_parallel == 1:  # without a bubble, all take the same time
        return [family for family in question.families if family == "1f1b"]
    left_out = {"auto"}
    if setup.hides_experts and not question.by_megatron:
        left_out |= {family for family in question.families if family not in PAIRED}
    # With one chunk a rank it is GPipe, with one micro-batch 1F1B.
    if min(setup.placement.num_chunks, setup.num_microbatches) == 1:
        left_out.add("breadth-first")
    # Splitting undoes recomputation: W keeps nearly as much.
    if setup.recompute != "none":
        left_out |= {family for family in question.families if splits_backward(family)}
    if must_be_partitioned(question, setup):
        left_out |= {family for family in question.families if family != "breadth-first"}
    return [family for family in question.families if family not in left_out]


def numbers_of_segments(question: Question, setup: TrainingSetup) -> list[int]:
    """The numbers of segments that the search tries: two at least, and otherwise none with too short segments."""
    most = max(2, setup.sequence_length // (_SHORTEST * setup.context_parallel))
    return [segments for segments in question.segments if segments <= most]


def may_be_partitioned(question: Question, setup: TrainingSetup) -> bool:
    """Whether a search may choose that replicas keep shares of the state of a set-up, in some number of chunks:
    `breadth-first` gathers a chunk once each way, other orders whenever chunks change."""
    if question.partitions_state is not None or "breadth-first" not in question.families:
        return False
    if setup.data_group.size == 1 or setup.num_microbatches == 1 or setup.hides_experts:
        return False
    return max(numbers_of_chunks(question, setup), default=1) >= _CHUNKS_OF_PARTITIONED


def must_be_partitioned(question: Question, setup: TrainingSetup) -> bool:
    """Whether a search has chosen that replicas keep shares of the state, since it would not fit otherwise."""
    return setup.partitions_state and question.partitions_state is None


def partitioned(question: Question, setup: TrainingSetup) -> TrainingSetup:
    """The set-up with a partitioned state if the search may choose that and it saves memory."""
    is_breadth_first = question.partitions_state is None and setup.family == "breadth-first"
    saves = setup.placement.num_chunks >= _CHUNKS_OF_PARTITIONED and setup.data_group.size > 1
    if is_breadth_first and saves:
        return setup.but(partitions_state=True)
    return setup


def may_move(setup: TrainingSetup) -> bool:
    """Whether activations of a set-up may move to the host: a search tries that with 1F1B alone."""
    return setup.family == "1f1b"


def may_move_by_layer(question: Question, setup: TrainingSetup) -> bool:
    """Whether units of a set-up may move layer by layer: schedule plans keep all layers until the last has run."""
    return not (question.by_megatron or setup.hides_experts)


def ways_to_move(question: Question, setup: TrainingSetup) -> tuple[Moves, ...]:
    """What of a set-up may move to the host. Megatron moves whole layers without a pipeline and recomputation, and in
    no hybrid model; its schedule plans move none. Beside layers that are recomputed whole it moves nothing: it would
    read the activations of these back before they have left."""
    if not question.by_megatron:
        return (Moves.UNITS,)
    if setup.recompute == FULL:
        return ()
    is_plain = setup.recompute == "none" and setup.model.pattern is None and not setup.hides_experts
    return (Moves.MODULES, Moves.LAYERS) if is_plain and setup.pipeline_parallel == 1 else (Moves.MODULES,)


def cuts(setup: TrainingSetup, segments: int) -> Iterator[Candidate]:
    """The set-up cut evenly, for the least memory, and balanced, which is faster."""
    seen: set[tuple[int, ...]] = set()
    for strategy in ("even",) if segments == 1 else ("even", "balanced"):
        lengths = lengths_of(setup, strategy, segments)
        if lengths is not None and lengths not in seen:
            seen.add(lengths)
            way = setup.cp_comm_type if segments == 1 else None
            # Tensor-parallel overlap has buffers of one length, and gathers beside the products of weight gradients.
            hides = setup.hides_tensor_exchange and len(set(lengths)) == 1 and not setup.splits_backward
            cut = setup.but(segments=lengths, cp_comm_type=way, hides_tensor_exchange=hides)
            yield Candidate(cut, strategy)


def lengths_of(setup: TrainingSetup, strategy: str, segments: int) -> tuple[int, ...] | None:
    """The lengths that training would have with these flags; None if a sequence is too short."""
    time = setup_pace(setup) if strategy == "balanced" else None
    multiple = segment_multiple(setup.token_shares, setup.context_parallel)
    return _cut(setup.model, setup.sequence_length, multiple, strategy, segments, time)


@lru_cache(maxsize=1 << 14)  # many bounds cut the same set-up
def evenly_cut(setup: TrainingSetup, segments: int) -> TrainingSetup | None:
    """The set-up cut into segments of equal lengths; None if a sequence is too short."""
    lengths = lengths_of(setup, "even", segments)
    way = setup.cp_comm_type if segments == 1 else None
    return None if lengths is None else setup.but(segments=lengths, cp_comm_type=way)


@lru_cache(maxsize=4096)
def _cut(
    model: ModelShape, length: int, multiple: int, strategy: str, segments: int, time: SegmentTime | None
) -> tuple[int, ...] | None:
    flops = paper_flops(model)
    rows = A100.full_speed_rows
    try:
        return cut_sequence(strategy, Task(length, segments, multiple, time=time, flops=flops, full_speed_rows=rows))
    except ValueError:
        return None


def powers_of_two(most: int) -> list[int]:
    """Those up to `most`; at least 1."""
    return [1 << exponent for exponent in range(max(most, 1).bit_length())]
