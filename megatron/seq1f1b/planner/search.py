"""The best configurations: ranked by throughput among those that fit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from ..costs import action_costs
from ..costs.memory import GIB, rank_memory
from ..schedule import Schedule, build
from ..simulator import Prediction, predict, shortest
from .bounds import least_bytes, least_seconds
from .question import Candidate, Question
from .space import candidates, stage_costs

Progress = Callable[[int, int], None]  # takes the number of candidates done, and of all

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
        fitting = [each for each in candidates(question) if least_bytes(each.setup) <= limit]
        self._bounded: list[tuple[float, Candidate]] = []
        for done, each in enumerate(fitting):
            progress(done, 2 * len(fitting))
            self._bounded.append((least_seconds(each.setup, question.machine), each))
        self._bounded.sort(key=lambda entry: entry[0])

    def best(
        self, count: int = 5, memory_gib: float | None = None, accept: Callable[[Candidate], bool] = lambda _: True
    ) -> list[Plan]:
        """The `count` fastest configurations that fit, fastest first; empty if none fits.

        Candidates are simulated in the order of their lower bounds, until the next is above the time of the last one
        kept: of the named families nothing faster is missed. `auto` then takes its turn on the winners. `memory_gib`
        is less than that of the question; plans that `accept` rejects are left out.
        """
        limit = GIB * (memory_gib or self.question.memory_limit)
        kept: list[Plan] = []

        def consider(candidate: Candidate) -> None:
            found = self._if_it_fits(candidate, limit, kept[-1].prediction.seconds if len(kept) == count else inf)
            if found is not None and found not in kept:
                kept.append(found)
                kept.sort(key=lambda each: each.prediction.seconds)
                del kept[count:]

        total = len(self._bounded)
        for done, (bound, candidate) in enumerate(self._bounded):
            if len(kept) == count and bound >= kept[-1].prediction.seconds:
                break
            self.progress(total + done, 2 * total)
            if accept(candidate):
                consider(candidate)
        if "auto" in self.question.families:
            for winner in list(kept):
                automatic = replace(winner.candidate, setup=replace(winner.candidate.setup, family="auto"))
                if _auto_is_possible(automatic) and accept(automatic):
                    consider(automatic)
        self.progress(2 * total, 2 * total)
        return kept

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
