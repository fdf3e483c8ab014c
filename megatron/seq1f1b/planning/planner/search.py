"""The best configurations: ranked by throughput among those that fit."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice
from math import ceil, inf
from typing import Any, NamedTuple

from ...schedule import FAMILIES, Action, Shape, build, units_to_move, with_moves
from ..costs.layer_bytes import keeps_logits
from ..costs.machine import GIB, Machine
from ..costs.stage_costs import action_costs, setup_costs
from ..costs.stage_times import stage_rows, step_end
from ..costs.step_memory import Memory, host_bytes, kept, rank_memory, static_memory
from ..costs.training_setup import TrainingSetup
from ..simulator.step import Prediction, predict
from .space import (
    Candidate,
    Question,
    Room,
    all_sizes,
    cut,
    cuts,
    families,
    numbers_of_segments,
    partitioned,
    spread,
)

# This many micro-batches at once fill all tiles and waves.
_MANY = 256
# Tiles may make as much of a difference between cuts.
_ROUNDING = 0.96
# `auto` plans at the granularity of units, which takes too long beyond this many actions.
MOST_ACTIONS_OF_AUTO = 30_000

Progress = Callable[[int, int], None]  # takes the number of set-ups done, and of all


@dataclass(frozen=True)
class Plan:
    """A configuration and what is predicted of it."""

    candidate: Candidate
    prediction: Prediction

    @property
    def memory_gib(self) -> float:
        """The memory of the fullest rank."""
        return max(memory.total for memory in self.prediction.memory) / GIB

    @property
    def host_gib(self) -> float:
        """The most that a rank has in the memory of its host."""
        return max(self.prediction.host_bytes) / GIB


class _Sizes(NamedTuple):
    """Parallel sizes before layers are spread over stages, and a number of segments unless it is still open."""

    sizes: TrainingSetup
    segments: int | None = None


class _Scheduled(NamedTuple):
    """A set-up with a family and a number of segments, before its sequences are cut."""

    setup: TrainingSetup
    family: str
    segments: int


class _TooLarge(NamedTuple):
    """Cuts of a set-up, the fastest first, that may fit once something of them moves to the host."""

    cuts: tuple[Candidate, ...]


def least_seconds(setup: TrainingSetup, machine: Machine) -> float:
    """A lower bound: the compute of a rank, with what other ranks compute before its first and after its last action.

    With weight gradients apart, those of a rank may fill the time after its last input gradient.
    """
    rows = stage_rows(setup, machine)
    work = [sum(f) + sum(i) + sum(w) for f, i, w in rows]
    around = [f[0] if setup.splits_backward else f[0] + i[0] + w[0] for f, i, w in rows]
    ranks, longest, before = setup.pipeline_parallel, 0.0, 0.0
    for rank in range(ranks):
        total = setup.num_microbatches * sum(work[stage] for stage in setup.placement.stages_of(rank))
        # The end of the step looks alike on all ranks between the first and the last.
        reduce = step_end(setup, machine, rank).reduce if rank in (0, 1, ranks - 1) else 0.0
        longest = max(longest, before + total + reduce)
        before += around[rank]
    ends = [step_end(setup, machine, rank) for rank in {0, ranks - 1}]
    return longest + max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step


def least_seconds_of(sizes: TrainingSetup, machine: Machine, segments: int | None = None) -> float:
    """A lower bound for all schedules, spreads of layers and cuts: ranks share the compute of an even cut and never
    idle; inf where there is no such cut.

    If the number of segments is open, kernels lose nothing to launches, tiles and waves, as in very large
    micro-batches.
    """
    one_stage: TrainingSetup | None
    if segments is None:
        alone, share = sizes.alone, 1 / _MANY
        many = _MANY * alone.micro_batch_size
        one_stage = replace(alone, micro_batch_size=many, keeps_logits=keeps_logits(alone), cp_comm_type=None)
    else:
        one_stage, share = _evenly_cut(sizes.alone, segments), _share(segments)
    if one_stage is None:
        return inf
    work = share * sum(map(sum, stage_rows(one_stage, machine)[0]))
    return sizes.num_microbatches * work / sizes.pipeline_parallel + machine.host.step


def least_seconds_cut(setup: TrainingSetup, machine: Machine, segments: int) -> float:
    """A lower bound for all cuts into this number of segments: kernels lose least to launches where all segments are
    alike, and no first segment is shorter than the mean. `_ROUNDING` allows for the tiles of single lengths."""
    evenly = _evenly_cut(setup, segments)
    return 0.0 if evenly is None else _share(segments) * least_seconds(evenly, machine)


def _evenly_cut(setup: TrainingSetup, segments: int) -> TrainingSetup | None:
    lengths, way = cut(setup, "even", segments), setup.cp_comm_type if segments == 1 else None
    return None if lengths is None else replace(setup, segments=lengths, cp_comm_type=way)


def _share(segments: int) -> float:
    return _ROUNDING if segments > 1 else 1.0


def least_bytes(setup: TrainingSetup, segments: int | None = None) -> float:
    """A lower bound on the fullest rank, on its device and host together: weights, gradients, optimizer state, and on
    the first rank the activations of as many micro-batches as every schedule holds at once, or of one if the number of
    segments is open."""
    first, most, held = _least_parts(setup)
    return max(first + held * _at_once(setup, segments), most)


@lru_cache(maxsize=1 << 16)
def _least_parts(setup: TrainingSetup) -> tuple[float, float, float]:
    """What stays on the first rank, what stays on the fullest, and what a micro-batch leaves on the first."""
    static = [sum(static_memory(setup, rank)) for rank in range(setup.pipeline_parallel)]
    whole = replace(setup, segments=(setup.sequence_length,), offloads=0.0)
    stages = (whole.stages[stage] for stage in setup.placement.stages_of(0))
    return static[0], max(static), sum(float(kept(whole, stage).sum()) for stage in stages)


def _at_once(setup: TrainingSetup, segments: int | None) -> float:
    """How many micro-batches the first rank holds at least."""
    if segments is None:
        return 1.0
    return min(setup.num_microbatches, 1 + (setup.pipeline_parallel - 1) / (segments * setup.placement.num_chunks))


def least_seconds_away(setup: TrainingSetup, room: Room, segments: int | None = None) -> float:
    """What the copies of the first rank take at least; inf where its memory and the host's are too small.

    After the last forward of each micro-batch, what exceeds the memory is on the host. One byte can be there at as many
    such moments as micro-batches are held at once, and what is there has been copied once and will be once more.
    """
    over = least_bytes(setup, segments) - room.device
    if over <= 0:
        return 0.0
    if _least_parts(setup)[1] > room.device or over > room.host:
        return inf
    return max(2, setup.num_microbatches / ceil(_at_once(setup, segments))) * over / room.bandwidth


def fullest_ranks(setup: TrainingSetup) -> Iterable[int]:
    """The ranks that may be fullest: the first holds the most units, the last the loss, and another may have the most
    layers."""
    ranks, layers = range(setup.pipeline_parallel), setup.layers_per_stage
    deepest = max(ranks, key=lambda rank: sum(layers[stage] for stage in setup.placement.stages_of(rank)))
    return dict.fromkeys((0, ranks[-1], deepest))


def memory_in_flight(setup: TrainingSetup) -> Iterator[Memory]:
    """The memory of `fullest_ranks`."""
    share = 0.0 if setup.offloads_modules else setup.offloads
    sizes = replace(setup, offloads=0.0) if share else setup  # which do not depend on it
    for rank in fullest_ranks(setup):
        yield rank_memory(sizes, _in_flight(setup, rank, share), rank)


def host_in_flight(setup: TrainingSetup) -> float:
    """The most that one of `fullest_ranks` has in the memory of its host, where whole units move."""
    return max(host_bytes(setup, _in_flight(setup, rank, setup.offloads)) for rank in fullest_ranks(setup))


def _in_flight(setup: TrainingSetup, rank: int, share: float) -> list[Action]:
    """The actions of a rank in a step as long as memory needs: a full pipeline holds few micro-batches, `breadth-first`
    all."""
    few = 2 * ceil(setup.pipeline_parallel / len(setup.segments)) + 2
    count = setup.num_microbatches if setup.family == "breadth-first" else min(setup.num_microbatches, few)
    return _order(setup.family, Shape(setup.placement, count, len(setup.segments)), rank, share)


@lru_cache(maxsize=1 << 16)
def fits(setup: TrainingSetup, limit: float) -> bool:
    """Whether the ranks that hold most stay below a limit in bytes."""
    return all(memory.total <= limit for memory in memory_in_flight(setup))


@lru_cache(maxsize=1 << 16)
def fitted(setup: TrainingSetup, room: Room) -> TrainingSetup | None:
    """The set-up with the least of its activations in the memory of the host, in sixteenths, so that it fits."""

    if fits(setup, room.device):
        return setup

    def moving(sixteenths: int) -> TrainingSetup:
        return replace(setup, offloads=sixteenths / 16, offloads_modules=room.by_modules)

    if not room.host or not fits(moving(16), room.device):
        return None
    return moving(bisect_left(range(16), True, 1, key=lambda sixteenths: fits(moving(sixteenths), room.device)))


@lru_cache(maxsize=2048)
def _order(family: str, shape: Shape, rank: int, offloads: float) -> list[Action]:
    """Many candidates differ in other things than their schedule."""
    order = FAMILIES[family](shape).order(rank)
    return with_moves(order, units_to_move(order, offloads)) if offloads else order


class Search:
    """The candidates of a question by their lower bounds, the predictions that have been made, and the winners with too
    many actions for `auto`.

    What is to be tried waits in the order of a lower bound of its step: first sizes, from these numbers of segments,
    from these chunks and schedules, from these the best cut that fits, from this its prediction, each with a closer
    bound than what it came from. What comes up first with its exact time is the fastest that is left.
    """

    def __init__(self, question: Question, progress: Progress = lambda done, total: None) -> None:
        self.question, self.progress = question, progress
        self.plans: dict[Candidate, Plan] = {}
        self.too_long_for_auto: set[Candidate] = set()
        self._sizes = [
            (least_seconds_of(sizes, question.machine), number, _Sizes(sizes))
            for number, sizes in enumerate(all_sizes(question))
        ]
        self._closer: dict[object, list[tuple[float, Any]]] = {}

    def best(
        self,
        count: int = 5,
        memory_gib: float | None = None,
        accept: Callable[[Candidate], bool] = lambda _: True,
        below: float = inf,
    ) -> list[Plan]:
        """The `count` fastest configurations that fit, fastest first; empty if none fits in less than `below` seconds.

        `auto` is tried on the winners, and left out where it is no faster than they are. `memory_gib` is less than that
        of the question; plans that `accept` rejects are left out.
        """
        room = self.question.room if memory_gib is None else replace(self.question, memory_gib=memory_gib).room
        found = [*islice(self.fastest_first(room, accept, below), count)]
        if "auto" in self.question.families:
            for winner in found[:]:
                automatic = self._automatic(winner.candidate, room)
                if automatic is None or not accept(automatic.candidate) or automatic in found:
                    continue
                if automatic.prediction.seconds < winner.prediction.seconds:
                    found.append(automatic)
            found = sorted(found, key=lambda each: each.prediction.seconds)[:count]
        self.progress(len(self._sizes), len(self._sizes))
        return found

    def fastest_first(
        self, room: Room, accept: Callable[[Candidate], bool] = lambda _: True, below: float = inf
    ) -> Iterator[Plan]:
        """All configurations of the named families that `best` chooses from, one after the other."""
        waiting: list[tuple[float, int, Any]] = [*self._sizes]
        heapify(waiting)
        number, done = len(self._sizes), 0  # numbers decide between equal bounds
        while waiting:
            bound, _, first = heappop(waiting)
            if bound >= below:
                return
            if isinstance(first, Plan):
                yield first
                continue
            if isinstance(first, _Sizes) and first.segments is None:
                self.progress(done, len(self._sizes))
                done += 1
            if first not in self._closer:
                self._closer[first] = list(self._closer_bounds(first))
            closer: Iterable[tuple[float, Any]] = self._closer[first]
            if isinstance(first, _Scheduled):
                allowed = [each for each in closer if accept(each[1])]
                closer = [found for group in _by_exchange(allowed) for found in self._fitting(first, group, room)]
            elif isinstance(first, _TooLarge):
                closer = ((bound, each) for each in _moved(first, room))
            for least, each in closer:
                if not isinstance(each, Plan) or _has_room(each, room):
                    heappush(waiting, (max(bound, least), number, each))
                    number += 1

    def _fitting(
        self, item: _Scheduled, by_cut: Sequence[tuple[float, Any]], room: Room
    ) -> Iterator[tuple[float, Any]]:
        """The best cut that fits, and the best of all if something of it can move to the host."""
        presses = self._seconds_away(item, room) > 0
        for number, (least, candidate) in enumerate(by_cut):
            if not presses and fits(candidate.setup, room.device):
                yield least, candidate
                return
            if room.host and item.family == "1f1b" and number == 0:
                yield least, _TooLarge(tuple(each for _, each in by_cut))

    def _closer_bounds(self, item: object) -> Iterator[tuple[float, Any]]:
        """What an item is refined to, with lower bounds."""
        machine, room = self.question.machine, self.question.room
        match item:
            case _Sizes(sizes, None):
                for segments in numbers_of_segments(self.question, sizes):
                    yield least_seconds_of(sizes, machine, segments), _Sizes(sizes, segments)
            case _Sizes(sizes, int(segments)):
                for setup in spread(self.question, sizes):
                    for family in families(self.question, setup):
                        scheduled = _Scheduled(setup, family, segments)
                        away = self._seconds_away(scheduled, room)
                        if away < inf:
                            least = least_seconds_cut(replace(setup, family=family), machine, segments)
                            yield max(away, least), scheduled
            case _Scheduled():
                by_cut = cuts(*item)
                even = next(by_cut, None)
                if even is None:
                    return
                lean = partitioned(self.question, even.setup)
                if room.host or fits(even.setup, room.device) or (lean is not even.setup and fits(lean, room.device)):
                    whole = [*by_cut, even]
                    shares = [replace(each, setup=partitioned(self.question, each.setup)) for each in whole]
                    for each in filter(self.question.accepts, dict.fromkeys(whole + shares)):
                        yield least_seconds(each.setup, machine), each
            case Candidate() if self.question.accepts(item):  # also what has moved to the host
                found = self.plans[item] = predict_candidate(item, self.question)
                yield found.prediction.seconds, found

    def _seconds_away(self, item: _Scheduled, room: Room) -> float:
        """`least_seconds_away` of an item, with a partitioned state where that may be."""
        lean = partitioned(self.question, replace(item.setup, family=item.family))
        return least_seconds_away(lean if lean.partitions_state else item.setup, room, item.segments)

    def _automatic(self, candidate: Candidate, room: Room) -> Plan | None:
        """The plan of a candidate with `auto`; None if it does not fit, or takes too long to make."""
        # Its weight gradients wait.
        setup = replace(candidate.setup, family="auto", hides_tensor_exchange=False)
        candidate = replace(candidate, setup=setup)
        if candidate not in self.plans:
            if setup.pipeline_parallel == 1 or setup.recompute != "none":
                return None
            if 3 * setup.shape.num_units * setup.placement.num_stages > MOST_ACTIONS_OF_AUTO:
                self.too_long_for_auto.add(candidate)
                return None
            if not self.question.accepts(candidate):
                return None
            self.plans[candidate] = predict_candidate(candidate, self.question)
        found = self.plans[candidate]
        return found if _has_room(found, room) else None


def _by_exchange(by_cut: Sequence[tuple[float, Any]]) -> list[list[tuple[float, Any]]]:
    """Cuts with and without tensor-parallel collectives beside products; a bound does not tell which is faster."""
    return [[each for each in by_cut if each[1].setup.hides_tensor_exchange == hides] for hides in (True, False)]


def _moved(item: _TooLarge, room: Room) -> Iterator[Candidate]:
    """The first of the cuts that fits, with what has to move to the host."""
    setups = ((each, fitted(each.setup, room)) for each in item.cuts)
    return islice((replace(each, setup=setup) for each, setup in setups if setup is not None), 1)


def _has_room(plan: Plan, room: Room) -> bool:
    return plan.memory_gib * GIB <= room.device and plan.host_gib * GIB <= room.host


def predict_candidate(candidate: Candidate, question: Question) -> Plan:
    """Predict a candidate, whether or not it fits; `auto` plans by the costs that training has."""
    setup, schedule = candidate.setup, None
    if setup.family == "auto":
        costs = action_costs(setup_costs(setup), setup.layers_per_stage, setup.segments)
        schedule = build("auto", setup.shape, costs)
    return Plan(candidate, predict(setup, question.machine, schedule))
