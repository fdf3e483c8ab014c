"""The best configurations: ranked by throughput among those that fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice
from math import ceil, inf
from typing import Any, NamedTuple

from ...schedule import FAMILIES, Action, Shape, build
from ..costs import action_costs
from ..costs.layer_bytes import keeps_logits
from ..costs.machine import GIB, Machine
from ..costs.stage_times import stage_rows, step_end
from ..costs.step_memory import Memory, activation_tables, rank_memory, static_memory
from ..costs.training_setup import TrainingSetup
from ..simulator import Prediction, predict, shortest
from .space import Candidate, Question, cut, cuts, partitioned, schedules, setups, stage_costs

# So many micro-batches at once fill all tiles and waves.
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


class _Scheduled(NamedTuple):
    """A set-up with a family and a number of segments, before it is known where they are cut."""

    setup: TrainingSetup
    family: str
    segments: int


class _Simulated(NamedTuple):
    """A candidate that fits, and was simulated with messages that do not wait for each other."""

    candidate: Candidate


def least_seconds(setup: TrainingSetup, machine: Machine) -> float:
    """No step is shorter than the compute of a rank, with that before its first and after its last action elsewhere.

    With weight gradients apart, those of a rank may fill the time after its last input gradient.
    """
    rows = stage_rows(setup, machine)
    work = [sum(f) + sum(i) + sum(w) for f, i, w in rows]
    around = [f[0] if setup.splits_backward else f[0] + i[0] + w[0] for f, i, w in rows]
    return _least(setup, machine, work, around)


def least_seconds_of(setup: TrainingSetup, machine: Machine) -> float:
    """What no schedule of the set-up and no way to cut its sequences falls below.

    The busiest rank never idles, and its kernels lose nothing to launches, nor to tiles and waves that are not full, as
    it would be for ever larger micro-batches.
    """
    endless = replace(
        setup, micro_batch_size=_MANY * setup.micro_batch_size, keeps_logits=keeps_logits(setup), cp_comm_type=None
    )
    work = [(sum(f) + sum(i) + sum(w)) / _MANY for f, i, w in stage_rows(endless, machine)]
    return _least(setup, machine, work, [0.0] * len(work))


def least_seconds_cut(setup: TrainingSetup, machine: Machine, segments: int) -> float:
    """What no way to cut sequences into so many segments falls below: kernels lose least to launches where all segments
    are alike, and no first segment is shorter than the mean. What tiles make of single lengths is allowed for."""
    lengths = cut(setup, "even", segments)
    return 0.0 if lengths is None else _ROUNDING * least_seconds(replace(setup, segments=lengths), machine)


def _least(setup: TrainingSetup, machine: Machine, work: list[float], around: list[float]) -> float:
    """`work` is that of a micro-batch on each stage, `around` that of its first segment."""
    ranks, longest, before = setup.pipeline_parallel, 0.0, 0.0
    for rank in range(ranks):
        total = setup.num_microbatches * sum(work[stage] for stage in setup.placement.stages_of(rank))
        # The end of the step looks alike on all ranks between the first and the last.
        reduce = step_end(setup, machine, rank).reduce if rank in (0, 1, ranks - 1) else 0.0
        longest = max(longest, before + total + reduce)
        before += around[rank]
    ends = [step_end(setup, machine, rank) for rank in {0, ranks - 1}]
    return longest + max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step


def least_bytes(setup: TrainingSetup, segments: int | None = None) -> float:
    """What the fullest rank holds at least: weights, gradients, optimizer state, and on the first rank the activations
    of as many micro-batches as every schedule holds at once; one if the number of segments is open."""
    ranks = range(setup.pipeline_parallel)
    activation, _ = activation_tables(replace(setup, segments=(setup.sequence_length,)))
    held = sum(activation[stage][0] for stage in setup.placement.stages_of(0))
    if segments is not None:
        units = segments * setup.placement.num_chunks
        held *= min(setup.num_microbatches, 1 + (setup.pipeline_parallel - 1) / units)
    return max(sum(static_memory(setup, rank)) + (held if rank == 0 else 0.0) for rank in ranks)


def memory_in_flight(setup: TrainingSetup) -> Iterator[Memory]:
    """The memory of the ranks that hold most, for few micro-batches: as many as a full pipeline holds.

    The first holds the most units, the last the loss, and of those with the most layers the first the most units.
    """
    if setup.family != "breadth-first":
        few = 2 * ceil(setup.pipeline_parallel / len(setup.segments)) + 2
        setup = replace(setup, num_microbatches=min(setup.num_microbatches, few))
    ranks, layers = range(setup.pipeline_parallel), setup.layers_per_stage
    deepest = max(ranks, key=lambda rank: sum(layers[stage] for stage in setup.placement.stages_of(rank)))
    for rank in dict.fromkeys((0, ranks[-1], deepest)):
        yield rank_memory(setup, _order(setup.family, setup.shape, rank), rank)


@lru_cache(maxsize=1 << 16)
def fits(setup: TrainingSetup, limit: float) -> bool:
    """Whether the ranks that hold most stay below a limit in bytes."""
    return all(memory.total <= limit for memory in memory_in_flight(setup))


@lru_cache(maxsize=2048)
def _order(family: str, shape: Shape, rank: int) -> list[Action]:
    """Many candidates differ in other things than their schedule."""
    return FAMILIES[family](shape).order(rank)


def silent(done: int, total: int) -> None:
    pass


class Search:
    """The candidates of a question by their lower bounds, the predictions that have been made, and the winners whose
    schedule has too many actions for `auto`.

    What is to be tried waits in the order of a lower bound of its step: first set-ups, from these schedules and numbers
    of segments, from these their cuts, from these the simulation of the best cut that fits, each with a closer bound
    than what it came from. What comes up first with its exact time is the fastest that is left.
    """

    def __init__(self, question: Question, progress: Progress = silent) -> None:
        self.question, self.progress = question, progress
        self.plans: dict[Candidate, Plan] = {}
        self.too_long_for_auto: set[Candidate] = set()
        limit, machine = question.memory_limit * GIB, question.machine
        named = ((setup, replace(setup, family="breadth-first")) for setup in setups(question))
        self._bytes = {setup: least for setup, each in named if (least := self._least_bytes(each)) <= limit}
        self._setups = [(least_seconds_of(setup, machine), setup) for setup in self._bytes]
        self._closer: dict[object, list[tuple[float, Any]]] = {}

    def best(
        self,
        count: int = 5,
        memory_gib: float | None = None,
        accept: Callable[[Candidate], bool] = lambda _: True,
        below: float = inf,
    ) -> list[Plan]:
        """The `count` fastest configurations that fit, fastest first; empty if none fits in less than `below` seconds.

        `auto` takes its turn on the winners, and is left out where it is no faster than they are. `memory_gib` is less
        than that of the question; plans that `accept` rejects are left out.
        """
        limit = GIB * (self.question.memory_limit if memory_gib is None else memory_gib)
        kept = [*islice(self._fastest_first(limit, accept, below), count)]
        if "auto" in self.question.families:
            for winner in kept[:]:
                automatic = self._automatic(winner.candidate, limit)
                if automatic is None or not accept(automatic.candidate) or automatic in kept:
                    continue
                if automatic.prediction.seconds < winner.prediction.seconds:
                    kept.append(automatic)
            kept = sorted(kept, key=lambda each: each.prediction.seconds)[:count]
        self.progress(len(self._setups), len(self._setups))
        return kept

    def _fastest_first(self, limit: float, accept: Callable[[Candidate], bool], below: float) -> Iterator[Plan]:
        waiting: list[tuple[float, int, object]] = [
            (bound, number, setup) for number, (bound, setup) in enumerate(self._setups) if self._bytes[setup] <= limit
        ]
        heapify(waiting)
        number, done = len(self._setups), 0  # numbers decide between equal bounds
        while waiting:
            bound, _, first = heappop(waiting)
            if bound >= below:
                return
            if isinstance(first, Plan):
                yield first
                continue
            if isinstance(first, TrainingSetup):
                self.progress(done, len(self._setups))
                done += 1
            if first not in self._closer:
                self._closer[first] = list(self._closer_bounds(first))
            closer = self._closer[first]
            if isinstance(first, _Scheduled):  # the best cut that fits
                closer = [(at, each) for at, each in closer if accept(each) and fits(each.setup, limit)][:1]
            for least, each in closer:
                if not isinstance(each, Plan) or each.memory_gib * GIB <= limit:
                    heappush(waiting, (max(bound, least), number, each))
                    number += 1

    def _closer_bounds(self, item: object) -> Iterator[tuple[float, Any]]:
        """What an item consists of, or is refined to, with lower bounds."""
        machine, limit = self.question.machine, self.question.memory_limit * GIB
        match item:
            case TrainingSetup():
                for family, segments in schedules(self.question, item):
                    named = replace(item, family=family)
                    if self._least_bytes(named, segments) <= limit:
                        yield least_seconds_cut(named, machine, segments), _Scheduled(item, family, segments)
            case _Scheduled():
                by_cut = cuts(*item)
                even = next(by_cut, None)
                if even is None:
                    return
                lean = partitioned(self.question, even.setup)
                if fits(even.setup, limit) or (lean is not even.setup and fits(lean, limit)):
                    whole = [*by_cut, even]
                    shares = [replace(each, setup=partitioned(self.question, each.setup)) for each in whole]
                    for each in dict.fromkeys(whole + shares):
                        yield least_seconds(each.setup, machine), each
            case Candidate():
                yield shortest(item.setup, machine), _Simulated(item)
            case _Simulated():
                found = self.plans[item.candidate] = Plan(item.candidate, predict(item.candidate.setup, machine))
                yield found.prediction.seconds, found

    def _least_bytes(self, setup: TrainingSetup, segments: int | None = None) -> float:
        return least_bytes(partitioned(self.question, setup), segments)

    def _automatic(self, candidate: Candidate, limit: float) -> Plan | None:
        """The plan of a candidate with `auto`; None if it does not fit, or takes too long to make."""
        setup = replace(candidate.setup, family="auto")
        candidate = replace(candidate, setup=setup)
        if candidate not in self.plans:
            actions = 3 * setup.shape.num_units * setup.placement.num_stages
            splits = setup.pipeline_parallel > 1 and setup.recompute == "none"
            if not splits:
                return None
            if actions > MOST_ACTIONS_OF_AUTO:
                self.too_long_for_auto.add(candidate)
                return None
            self.plans[candidate] = predict_candidate(candidate, self.question)
        found = self.plans[candidate]
        return found if found.memory_gib * GIB <= limit else None


def plan(question: Question, best: int = 5, progress: Progress = silent) -> list[Plan]:
    """The `best` fastest configurations that fit, fastest first; empty if none fits."""
    return Search(question, progress).best(best)


def predict_candidate(candidate: Candidate, question: Question) -> Plan:
    """Predict a candidate, whether or not it fits; `auto` plans by the costs that training has."""
    setup, schedule = candidate.setup, None
    if setup.family == "auto":
        costs = action_costs(stage_costs(setup), setup.layers_per_stage, setup.segments)
        schedule = build("auto", setup.shape, costs)
    return Plan(candidate, predict(setup, question.machine, schedule))
