"""The best configurations: those that fit, by throughput."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import count, islice, takewhile
from math import ceil, inf
from typing import Any, NamedTuple

from ..costs.layer_bytes import unit_bytes
from ..costs.machine import GIB, Machine, without_tiles
from ..costs.pair_times import pair_row, pair_times
from ..costs.simulator import Prediction, predict
from ..costs.stage_costs import action_costs, setup_costs
from ..costs.stage_times import stage_rows, step_end
from ..costs.step_memory import Memory, host_bytes, rank_memory, static_memory
from ..costs.training_setup import Moves, TrainingSetup
from ..schedule import FAMILIES, Action, Shape, build, units_to_move, with_moves
from .space import (
    Candidate,
    MemoryBudget,
    Question,
    all_sizes,
    cuts,
    families,
    lengths_of,
    numbers_of_segments,
    partitioned,
    spread,
    ways_to_move,
)

# `auto` plans at the granularity of units, which takes too long beyond this many actions.
MOST_ACTIONS_OF_AUTO = 30_000


@dataclass(frozen=True)
class Plan:
    """A configuration and its predicted step, with the memory of the fullest rank on its device and on its host."""

    candidate: Candidate
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.prediction.tokens_per_second

    @property
    def memory_gib(self) -> float:
        return max(memory.total for memory in self.prediction.memory) / GIB

    @property
    def host_gib(self) -> float:
        return max(self.prediction.host_bytes) / GIB

    def fits(self, budget: MemoryBudget) -> bool:
        return self.memory_gib * GIB <= budget.device and self.host_gib * GIB <= budget.host


class _Sizes(NamedTuple):
    """Parallel sizes and a recomputation, whose bound is still that of all recomputations."""

    setup: TrainingSetup
    segments: int


class _Open(NamedTuple):
    """A set-up that is not cut yet; without a family, its layers are not spread over stages, either."""

    setup: TrainingSetup
    segments: int
    family: str | None = None


def least_seconds(setup: TrainingSetup, machine: Machine) -> float:
    """A lower bound: the compute of a rank, with what other ranks compute before its first and after its last action.
    With weight gradients apart, those of a rank may fill the time after its last input gradient."""
    rows = stage_rows(setup, machine)
    work = [sum(f) + sum(i) + sum(w) for f, i, w in rows]
    around = [f[0] if setup.splits_backward else f[0] + i[0] + w[0] for f, i, w in rows]
    ranks = setup.pipeline_parallel
    longest = 0.0
    before = 0.0
    hidden = 0.0
    if setup.hides_experts:
        chunks = setup.placement.num_chunks
        units = setup.num_microbatches * len(setup.segments) * chunks
        hidden = _most_paired(setup, len(setup.segments), chunks) * units * pair_times(setup, machine).most_saved
    for rank in range(ranks):
        total = setup.num_microbatches * sum(work[stage] for stage in setup.placement.stages_of(rank)) - hidden
        # The end of the step looks alike on all ranks between the first and the last.
        reduce = step_end(setup, machine, rank).reduce if rank in (0, 1, ranks - 1) else 0.0
        longest = max(longest, before + total + reduce)
        before += around[rank]
    ends = [step_end(setup, machine, rank) for rank in {0, ranks - 1}]
    return longest + max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step


def least_seconds_of(sizes: TrainingSetup, machine: Machine, segments: int) -> float:
    """A lower bound for all schedules, spreads of layers and cuts: ranks share the compute of an even cut and never
    idle; inf where there is no such cut."""
    work = _least_work(sizes.alone, machine, segments)
    if sizes.hides_experts:
        # Of several chunks two have most pairs.
        paired = _most_paired(sizes, segments, min(2, sizes.pipeline_parallel))
        work -= paired * _most_hidden(sizes.alone, machine, segments)
    return sizes.num_microbatches * work / sizes.pipeline_parallel + machine.host.step


def least_seconds_of_any(sizes: TrainingSetup, question: Question, segments: int) -> float:
    """The same for all recomputations: none of them takes less than no recomputation."""
    hides = question.by_megatron and sizes.expert_parallel > 1
    return least_seconds_of(
        replace(sizes, recompute="none", recomputed_share=1.0, hides_experts=hides), question.machine, segments
    )


@lru_cache(maxsize=1 << 16)
def _least_work(alone: TrainingSetup, machine: Machine, segments: int) -> float:
    """Seconds of a micro-batch on all stages, if it is cut evenly; inf where it cannot be."""
    evenly = _evenly_cut(alone, segments)
    if evenly is None:
        return inf
    return sum(map(sum, stage_rows(evenly, _of_any_cut(machine, segments))[0]))


@lru_cache(maxsize=1 << 16)
def _most_hidden(alone: TrainingSetup, machine: Machine, segments: int) -> float:
    """The most seconds of a micro-batch that pairs hide, if all of its units are in pairs."""
    evenly = _evenly_cut(alone, segments)
    if evenly is None:
        return 0.0
    row = pair_row(evenly, machine, evenly.stages[0])
    return min(sum(row.exchange_f), sum(row.compute_b)) + min(sum(row.exchange_b), sum(row.compute_f))


def _most_paired(setup: TrainingSetup, segments: int, chunks: int) -> float:
    """The most of the units of a rank that run their forward beside a backward, as a share: those of the last rank, on
    which the fewest forwards are alone."""
    alone = (chunks - 1) * setup.pipeline_parallel + 1
    return max(0.0, 1 - alone / (setup.num_microbatches * segments * chunks))


def least_seconds_cut(setup: TrainingSetup, machine: Machine, segments: int) -> float:
    """A lower bound for all cuts into this number of segments: kernels lose least to launches where all segments are
    alike, and no first segment is shorter than the mean."""
    evenly = _evenly_cut(setup, segments)
    return 0.0 if evenly is None else least_seconds(evenly, _of_any_cut(machine, segments))


def _of_any_cut(machine: Machine, segments: int) -> Machine:
    """The machine on which an even cut into `segments` takes least: the tiles of single lengths do not count."""
    return machine if segments == 1 else without_tiles(machine)


def _evenly_cut(setup: TrainingSetup, segments: int) -> TrainingSetup | None:
    lengths = lengths_of(setup, "even", segments)
    way = setup.cp_comm_type if segments == 1 else None
    return None if lengths is None else replace(setup, segments=lengths, cp_comm_type=way)


def least_bytes(setup: TrainingSetup, segments: float = inf) -> float:
    """A lower bound on the fullest rank, on its device and host together: its state, and on the first rank activations
    of as many micro-batches as every schedule holds at once, whatever the number of segments if that is inf."""
    first, most, held = _least_parts(setup)
    return max(first + held * _at_once(setup, segments), most)


@lru_cache(maxsize=1 << 16)
def _least_parts(setup: TrainingSetup) -> tuple[float, float, float]:
    """The state of the first rank, that of the fullest, and the activations of a micro-batch on the first."""
    static = [sum(static_memory(setup, rank)) for rank in range(setup.pipeline_parallel)]
    whole = replace(setup, segments=(setup.sequence_length,), offloads=0.0)
    held = sum(
        float(unit_bytes(whole, stage).sum()) for stage in (whole.stages[n] for n in setup.placement.stages_of(0))
    )
    return static[0], max(static), held


def _at_once(setup: TrainingSetup, segments: float) -> float:
    """The least number of micro-batches that the first rank holds at some moment."""
    return min(setup.num_microbatches, 1 + (setup.pipeline_parallel - 1) / (segments * setup.placement.num_chunks))


def least_seconds_away(setup: TrainingSetup, budget: MemoryBudget, segments: int) -> float:
    """A lower bound from the time to copy what exceeds the memory of the first rank to its host and back; inf if both
    memories together are too small. The excess is on the host after the last forward of each micro-batch, and a byte
    may stay there for as many of these moments as micro-batches are held at once."""
    over = least_bytes(setup, segments) - budget.device
    if over <= 0:
        return 0.0
    if _least_parts(setup)[1] > budget.device or over > budget.host:
        return inf
    return max(2, setup.num_microbatches / ceil(_at_once(setup, segments))) * over / budget.bandwidth


def fullest_ranks(setup: TrainingSetup) -> Iterable[int]:
    """The ranks that may be fullest: the first has the most units, the last the loss, a third may have most layers."""
    ranks = range(setup.pipeline_parallel)
    layers = setup.layers_per_stage
    deepest = max(ranks, key=lambda rank: sum(layers[stage] for stage in setup.placement.stages_of(rank)))
    return dict.fromkeys((0, ranks[-1], deepest))


def memory_in_flight(setup: TrainingSetup) -> Iterator[Memory]:
    """Of `fullest_ranks`."""
    share = 0.0 if setup.moves_parts else setup.offloads
    sizes = replace(setup, offloads=0.0) if share else setup  # sizes of units do not depend on the share
    for rank in fullest_ranks(setup):
        yield rank_memory(sizes, _in_flight(setup, rank, share), rank)


def host_in_flight(setup: TrainingSetup) -> float:
    """The most that one of `fullest_ranks` has in the memory of its host, where whole units move."""
    return max(host_bytes(setup, _in_flight(setup, rank, setup.offloads)) for rank in fullest_ranks(setup))


def _in_flight(setup: TrainingSetup, rank: int, share: float) -> list[Action]:
    """The actions of a rank until memory is fullest: a full pipeline holds few micro-batches, `breadth-first` all."""
    few = 2 * ceil(setup.pipeline_parallel / len(setup.segments)) + 2
    count = setup.num_microbatches if setup.family == "breadth-first" else min(setup.num_microbatches, few)
    return _order(setup.family, Shape(setup.placement, count, len(setup.segments)), rank, share)


@lru_cache(maxsize=1 << 16)
def fits(setup: TrainingSetup, limit: float) -> bool:
    """Whether the ranks that hold most stay below a limit in bytes."""
    return all(memory.total <= limit for memory in memory_in_flight(setup))


@lru_cache(maxsize=1 << 16)
def fitted(setup: TrainingSetup, budget: MemoryBudget, moves: Moves) -> TrainingSetup | None:
    """The set-up with the least of its activations on the host so that it fits; None if nothing helps. Whole layers
    move, all but one at most, and sixteenths of all else."""
    if fits(setup, budget.device):
        return setup
    parts = 16
    most = 16
    if moves is Moves.LAYERS:
        parts = setup.model.num_layers
        most = parts - 1

    def moving(number: int) -> TrainingSetup:
        return replace(setup, offloads=number / parts, moves=moves)

    if not budget.host or not most or not fits(moving(most), budget.device):
        return None
    return moving(bisect_left(range(most), True, 1, key=lambda number: fits(moving(number), budget.device)))


@lru_cache(maxsize=2048)
def _order(family: str, shape: Shape, rank: int, offloads: float) -> list[Action]:
    order = FAMILIES[family](shape).order(rank)
    return with_moves(order, units_to_move(order, offloads)) if offloads else order


class Search:
    """The configurations that answer a question, fastest first; `plans` has all that were predicted, and
    `too_long_for_auto` the winners with too many actions for `auto`. Items wait in the order of a lower bound of their
    step: sizes and numbers of segments, from these chunks and schedules, from these the best cut that fits, from this
    its prediction, each with a closer bound. The first item with its exact time is the fastest that is left.
    `progress` is told how many items wait."""

    def __init__(self, question: Question, progress: Callable[[int], None] = lambda left: None) -> None:
        self.question = question
        self._progress = progress
        self.plans: dict[Candidate, Plan] = {}
        self.too_long_for_auto: set[Candidate] = set()

    def best(self, number: int = 5, below: float = inf) -> list[Plan]:
        """The fastest configurations that fit and take less than `below` seconds, fastest first. `auto` is tried on
        these winners, and left out where it is no faster."""
        found = [*islice(self.fastest_first(below), number)]
        if "auto" in self.question.families:
            for winner in found[:]:
                automatic = self._automatic(winner.candidate)
                if automatic and automatic not in found and automatic.prediction.seconds < winner.prediction.seconds:
                    found.append(automatic)
            found = sorted(found, key=lambda each: each.prediction.seconds)[:number]
        return found

    def megatron_baseline(self) -> Plan | None:
        """The best of Megatron's own schedules for the question; None if none fits."""
        return next(iter(Search(self.question.megatron_baseline(), self._progress).best(1)), None)

    def fastest_first(self, below: float = inf) -> Iterator[Plan]:
        """All configurations of the named families that fit in less than `below` seconds."""
        question = self.question
        first_ones = [_Sizes(each, k) for each in all_sizes(question) for k in numbers_of_segments(question, each)]
        bounds = (least_seconds_of_any(each.setup, question, each.segments) for each in first_ones)
        waiting: list[tuple[float, int, Any]] = [*zip(bounds, count(), first_ones)]
        heapify(waiting)
        numbers = count(len(waiting))  # decide between equal bounds
        while waiting and waiting[0][0] < below:
            self._progress(len(waiting))
            bound, _, first = heappop(waiting)
            if isinstance(first, Plan):
                yield first
                continue
            for least, each in self._closer(first):
                heappush(waiting, (max(bound, least), next(numbers), each))

    def _closer(self, item: Any) -> Iterator[tuple[float, Any]]:
        """The items that an item is refined to, with lower bounds."""
        question = self.question
        machine = self.question.machine
        budget = self.question.budget
        match item:
            case _Sizes(sizes, segments):
                yield least_seconds_of(sizes, machine, segments), _Open(sizes, segments)
            case _Open(sizes, segments, None):
                for setup in spread(question, sizes):
                    least: dict[bool, float] = {}  # families differ only in whether they split backwards
                    for family in families(question, setup):
                        away = self._seconds_away(setup, family, segments)
                        if away < inf:
                            named = replace(setup, family=family)
                            if named.splits_backward not in least:
                                least[named.splits_backward] = least_seconds_cut(named, machine, segments)
                            yield max(away, least[named.splits_backward]), _Open(setup, segments, family)
            case _Open(setup, segments, str(family)):
                is_tight = self._seconds_away(setup, family, segments) > 0
                yield from self._fitting(cuts(setup, family, segments), is_tight)
            case (Candidate(), *_):
                for moves in ways_to_move(question, item[0].setup):
                    for each in item:
                        if (moved := fitted(each.setup, budget, moves)) is not None:
                            yield least_seconds(moved, machine), replace(each, setup=moved)
                            break
            case Candidate() if question.accepts(item) and (found := self._plan(item)).fits(budget):
                yield found.prediction.seconds, found

    def _seconds_away(self, setup: TrainingSetup, family: str, segments: int) -> float:
        """`least_seconds_away`, with a partitioned state where the search may choose that."""
        smallest = partitioned(self.question, replace(setup, family=family))
        # Whole states need the same for all families, so caches serve.
        return least_seconds_away(smallest if smallest.partitions_state else setup, self.question.budget, segments)

    def _fitting(self, by_cut: Iterator[Candidate], is_tight: bool) -> Iterator[tuple[float, Any]]:
        """The best cut that fits. If the fastest one does not, those before it come as one item, since they may fit
        with activations on the host. Memory `is_tight` if none fits as it is. Cuts with tensor-parallel collectives
        beside products and cuts without are separate, since bounds do not rank them."""
        question = self.question
        budget = self.question.budget
        even = next(by_cut, None)  # needs least memory
        if even is None or not (budget.host or fits(partitioned(question, even.setup), budget.device)):
            return
        whole = [*by_cut, even]
        shares = [replace(each, setup=partitioned(question, each.setup)) for each in whole]
        allowed = [*filter(question.accepts, dict.fromkeys(whole + shares))]
        for hides in (True, False):
            ranked = [each for each in allowed if each.setup.hides_tensor_exchange == hides]
            too_large = [*takewhile(lambda each: is_tight or not fits(each.setup, budget.device), ranked)]
            if too_large and budget.host and even.setup.family == "1f1b":
                yield least_seconds(too_large[0].setup, question.machine), tuple(too_large)
            for each in ranked[len(too_large) :][:1]:
                yield least_seconds(each.setup, question.machine), each

    def _automatic(self, winner: Candidate) -> Plan | None:
        """The plan of a winner with `auto`; None if it does not fit, or takes too long to make."""
        # Its weight gradients run later, so collectives cannot hide behind them.
        setup = replace(winner.setup, family="auto", hides_tensor_exchange=False)
        candidate = replace(winner, setup=setup)
        if setup.pipeline_parallel == 1 or setup.recompute != "none" or not self.question.accepts(candidate):
            return None
        if 3 * setup.shape.num_units * setup.placement.num_stages > MOST_ACTIONS_OF_AUTO:
            self.too_long_for_auto.add(candidate)
            return None
        found = self._plan(candidate)
        return found if found.fits(self.question.budget) else None

    def _plan(self, candidate: Candidate) -> Plan:
        if candidate not in self.plans:
            self.plans[candidate] = predict_candidate(candidate, self.question)
        return self.plans[candidate]


def predict_candidate(candidate: Candidate, question: Question) -> Plan:
    """Predict a candidate, whether or not it fits; `auto` plans by the costs that training has."""
    setup = candidate.setup
    schedule = None
    if setup.family == "auto":
        costs = action_costs(setup_costs(setup), setup.layers_per_stage, setup.segments)
        schedule = build("auto", setup.shape, costs)
    return Plan(candidate, predict(setup, question.machine, schedule))
