"""The best configurations: ranked by throughput among those that fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from ...schedule import Schedule, build
from ..costs import action_costs
from ..costs.memory import GIB, rank_memory
from ..costs.training_setup import TrainingSetup
from ..simulator import Prediction, predict, shortest
from .bounds import least_bytes, least_seconds, least_seconds_of_all
from .question import Candidate, Question
from .space import scheduled, setups, stage_costs

Progress = Callable[[int, int], None]  # takes the number of set-ups done, and of all

# `auto` plans at the granularity of units, which takes too long beyond this many actions.
_MOST_ACTIONS_OF_AUTO = 30_000


@dataclass(frozen=True)
class Plan:
    """A configuration and what is predicted of it."""

    candidate: Candidate
    prediction: Prediction

    @property
    def memory_gib(self) -> float:
        """The memory of the fullest rank."""
        return max(memory.total for memory in self.prediction.memory) / GIB


def _silent(done: int, total: int) -> None:
    pass


class Search:
    """The candidates of a question by their lower bounds, and the predictions that have been made."""

    def __init__(self, question: Question, progress: Progress = _silent) -> None:
        self.question, self.progress = question, progress
        self.plans: dict[Candidate, Plan] = {}
        limit = question.memory_limit * GIB
        self._bytes = {setup: least for setup in setups(question) if (least := least_bytes(setup)) <= limit}
        self._setups = [(least_seconds_of_all(setup, question.machine), setup) for setup in self._bytes]
        self._setups.sort(key=lambda entry: entry[0])
        self._candidates: dict[TrainingSetup, list[tuple[float, Candidate]]] = {}

    def best(
        self, count: int = 5, memory_gib: float | None = None, accept: Callable[[Candidate], bool] = lambda _: True
    ) -> list[Plan]:
        """The `count` fastest configurations that fit, fastest first; empty if none fits.

        Candidates are simulated in the order of their lower bounds, until the next is above the time of the last one
        kept: of the named families nothing faster is missed. `auto` then takes its turn on the winners, and is left out
        where it is no faster than they are. `memory_gib` is less than that of the question; plans that `accept` rejects
        are left out.
        """
        limit = GIB * (self.question.memory_limit if memory_gib is None else memory_gib)
        kept: list[Plan] = []

        def consider(candidate: Candidate, known: float = inf) -> None:
            slowest = min(known, kept[-1].prediction.seconds if len(kept) == count else inf)
            found = self._if_it_fits(candidate, limit, slowest)
            if found is not None and found not in kept and found.prediction.seconds < known:
                kept.append(found)
                kept.sort(key=lambda each: each.prediction.seconds)
                del kept[count:]

        for bound, candidate in self._by_bound(limit):
            if len(kept) == count and bound >= kept[-1].prediction.seconds:
                break
            if accept(candidate):
                consider(candidate)
        if "auto" in self.question.families:
            fastest: dict[Candidate, float] = {}
            for winner in kept:
                automatic = replace(winner.candidate, setup=replace(winner.candidate.setup, family="auto"))
                fastest.setdefault(automatic, winner.prediction.seconds)
            for automatic, seconds in fastest.items():
                if _auto_is_possible(automatic) and accept(automatic):
                    consider(automatic, known=seconds)
        self.progress(len(self._setups), len(self._setups))
        return kept

    def _by_bound(self, limit: float) -> Iterator[tuple[float, Candidate]]:
        """Candidates by ascending lower bounds, without those of set-ups that need more than `limit` bytes.

        No set-up is scheduled before its own bound comes up.
        """
        waiting: list[tuple[float, int, TrainingSetup | Candidate]] = [
            (bound, number, setup) for number, (bound, setup) in enumerate(self._setups) if self._bytes[setup] <= limit
        ]
        number, done = len(self._setups), 0  # numbers decide between equal bounds
        while waiting:
            bound, _, first = heappop(waiting)
            if isinstance(first, Candidate):
                yield bound, first
                continue
            self.progress(done, len(self._setups))
            done += 1
            for entry in self._scheduled(first):
                heappush(waiting, (entry[0], number, entry[1]))
                number += 1

    def _scheduled(self, setup: TrainingSetup) -> list[tuple[float, Candidate]]:
        """The candidates of a set-up with their bounds."""
        if setup not in self._candidates:
            found = scheduled(self.question, setup)
            self._candidates[setup] = [(least_seconds(each.setup, self.question.machine), each) for each in found]
        return self._candidates[setup]

    def _if_it_fits(self, candidate: Candidate, limit: float, slowest: float) -> Plan | None:
        """The plan; None if it does not fit or takes longer than `slowest` seconds."""
        if candidate not in self.plans:
            setup, schedule = candidate.setup, schedule_of(candidate)
            # In the order of how long they take: memory, a bound, the prediction.
            if any(rank_memory(setup, schedule, rank).total > limit for rank in range(setup.pipeline_parallel)):
                return None
            if shortest(setup, self.question.machine, schedule) >= slowest:
                return None
            self.plans[candidate] = Plan(candidate, predict(setup, self.question.machine, schedule))
        found = self.plans[candidate]
        return found if found.memory_gib * GIB <= limit else None


def plan(question: Question, best: int = 5, progress: Progress = _silent) -> list[Plan]:
    """The `best` fastest configurations that fit, fastest first; empty if none fits."""
    return Search(question, progress).best(best)


def predict_candidate(candidate: Candidate, question: Question) -> Plan:
    """Predict a candidate, whether or not it fits."""
    return Plan(candidate, predict(candidate.setup, question.machine, schedule_of(candidate)))


def schedule_of(candidate: Candidate) -> Schedule:
    """The schedule that training would run; `auto` plans by the costs that training has."""
    setup = candidate.setup
    if setup.family != "auto":
        return build(setup.family, setup.shape)
    return build("auto", setup.shape, action_costs(stage_costs(setup), setup.layers_per_stage, setup.segments))


def _auto_is_possible(candidate: Candidate) -> bool:
    setup = candidate.setup
    actions = 3 * setup.shape.num_units * setup.placement.num_stages
    splits = setup.pipeline_parallel > 1 and setup.recompute != "full" and setup.model.experts is None
    return splits and actions <= _MOST_ACTIONS_OF_AUTO
