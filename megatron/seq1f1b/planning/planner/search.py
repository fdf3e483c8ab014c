"""The best configurations: ranked by throughput among those that fit; where none fits, the nearest that does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf

from ...errors import ParameterError
from ...schedule import Schedule, build
from ..costs import action_costs
from ..costs.machine import GIB, Machine
from ..costs.stage_times import stage_rows, step_end
from ..costs.step_memory import activation_tables, rank_memory, static_memory
from ..costs.training_setup import TrainingSetup
from ..simulator import Prediction, predict, shortest
from .space import Candidate, Question, scheduled, setups, stage_costs

# So many micro-batches at once fill all tiles and waves.
_MANY = 256


def least_seconds(setup: TrainingSetup, machine: Machine) -> float:
    """No step is shorter than the compute of a rank, with that before its first and after its last action elsewhere.

    With weight gradients apart, those of a rank may fill the time after its last input gradient.
    """
    rows = stage_rows(setup, machine)
    work = [sum(f) + sum(i) + sum(w) for f, i, w in rows]
    longest = around = 0.0
    ranks = setup.pipeline_parallel
    for rank in range(ranks):
        total = setup.num_microbatches * sum(work[stage] for stage in setup.placement.stages_of(rank))
        # The end of the step looks alike on all ranks between the first and the last.
        if rank in (0, 1, ranks - 1):
            reduce = step_end(setup, machine, rank).reduce
        longest = max(longest, around + total + reduce)
        f, i, w = rows[rank]
        around += f[0] if setup.splits_backward else f[0] + i[0] + w[0]
    ends = [step_end(setup, machine, rank) for rank in {0, ranks - 1}]
    return longest + max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step


def least_seconds_of_all(setup: TrainingSetup, machine: Machine) -> float:
    """What no schedule of the set-up and no way to cut its sequences falls below.

    The busiest rank never idles, and its kernels lose nothing to launches, nor to tiles and waves that are not full, as
    it would be for ever larger micro-batches.
    """
    endless = replace(setup, micro_batch_size=_MANY * setup.micro_batch_size)
    work = [(sum(f) + sum(i) + sum(w)) / _MANY for f, i, w in stage_rows(endless, machine)]
    ranks = range(setup.pipeline_parallel)
    busiest = max(sum(work[stage] for stage in setup.placement.stages_of(rank)) for rank in ranks)
    update = max(step_end(setup, machine, rank).update for rank in {0, setup.pipeline_parallel - 1})
    return setup.num_microbatches * busiest + update + machine.host.step


def least_bytes(setup: TrainingSetup) -> float:
    """What the fullest rank holds at least: weights, gradients, optimizer state, and on the first rank the activations
    of one micro-batch, which every schedule holds at once."""
    ranks = range(setup.pipeline_parallel)
    activation, _ = activation_tables(replace(setup, segments=(setup.sequence_length,)))
    held = sum(activation[stage][0] for stage in setup.placement.stages_of(0))
    return max(sum(static_memory(setup, rank)) + (held if rank == 0 else 0.0) for rank in ranks)


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


_DOUBLINGS = 12


def way_out(question: Question) -> ParameterError:
    """The error for a question without a plan."""
    model = question.model
    if not any(True for _ in setups(question)):
        return ParameterError(
            "no layout of {0} devices divides a batch of {1} sequences, {2} layers and {3} heads; "
            f"{{global_batch_size:{_next_batch(question)}}} can be divided",
            question.num_devices,
            question.global_batch_size,
            model.num_layers,
            model.num_kv_heads or model.num_heads,
        )
    least = min(map(least_bytes, setups(question))) / GIB
    why = (
        f"the leanest takes at least {least:.0f} GiB, for weights, gradients, optimizer state and one micro-batch"
        if least > question.memory_limit
        else "the leanest has too many activations in flight"
    )
    return ParameterError(
        f"no configuration fits {{0:.0f}} GiB a device: {{1}}; {_nearest(question)}", question.memory_limit, why
    )


def _next_batch(question: Question) -> int:
    return -(-question.global_batch_size // question.num_devices) * question.num_devices


def _nearest(question: Question) -> str:
    """More devices, and shorter sequences, by doubling and halving; in the form of a ParameterError's sentence."""
    found = []
    lean = replace(question, families=("1f1b",), strategies=("even",), recomputes=("full", "none"), micro_batches=(1,))
    for doubling in range(1, _DOUBLINGS):
        devices = question.num_devices << doubling
        batch = max(question.global_batch_size, 1)
        if plan(replace(lean, num_devices=devices, global_batch_size=batch), best=1):
            found.append(f"{{num_devices:{devices}}}")
            break
    for halving in range(1, _DOUBLINGS):
        length = question.sequence_length >> halving
        if length >= 1024 and plan(replace(lean, sequence_length=length), best=1):
            found.append(f"{{sequence_length:{length}}}")
            break
    return f"it would with {' or with '.join(found)}" if found else "take a smaller model"
