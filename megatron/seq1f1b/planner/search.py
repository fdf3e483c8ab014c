"""The best configurations: ranked by throughput among those that fit."""

from collections.abc import Callable
from dataclasses import dataclass

from ..costs.memory import GIB
from ..costs.stage_times import step_costs
from ..simulator import Prediction, predict
from .space import Candidate, Question, candidates, static_bytes


@dataclass(frozen=True)
class Plan:
    """A configuration and what is predicted of it."""

    candidate: Candidate
    prediction: Prediction

    @property
    def memory_gib(self) -> float:
        """Of the rank that takes most."""
        return max(memory.total for memory in self.prediction.memory) / GIB


def plan(
    question: Question, best: int = 10, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Plan]:
    """The `best` fastest configurations that fit, fastest first; empty if none fits.

    No step is faster than its slowest rank computes. Candidates are simulated in the order of that bound, until it is
    above the time of the last one kept, so nothing is missed. Raises ValueError if Megatron's rules allow none at all.
    """
    limit = question.memory_limit * GIB
    bounded = sorted(
        (
            (lower_bound(question, candidate), number, candidate)
            for number, candidate in enumerate(candidates(question))
            if static_bytes(candidate.setup) < limit
        ),
        key=lambda each: each[:2],
    )
    kept: list[Plan] = []
    for done, (bound, _, candidate) in enumerate(bounded):
        progress(done, len(bounded))
        if len(kept) == best and bound >= kept[-1].prediction.seconds:
            break
        if smallest_activations(candidate) + static_bytes(candidate.setup) > limit:
            continue
        prediction = predict(candidate.setup, question.machine)
        if max(memory.total for memory in prediction.memory) <= limit:
            kept.append(Plan(candidate, prediction))
            kept.sort(key=lambda each: each.prediction.seconds)
            del kept[best:]
    progress(len(bounded), len(bounded))
    return kept


def lower_bound(question: Question, candidate: Candidate) -> float:
    """Seconds that the rank with most to do computes in a step, and until its first and after its last action."""
    setup = candidate.setup
    costs = step_costs(setup, question.machine)
    placement = setup.placement

    def work(rank: int) -> float:
        stages = placement.stages_of(rank)
        return setup.num_microbatches * sum(sum(costs.f[s]) + sum(costs.i[s]) + sum(costs.w[s]) for s in stages)

    # The first unit goes through the stages before; input gradients of the last through them again.
    def around(rank: int) -> float:
        return sum(costs.f[stage][0] + costs.i[stage][0] for stage in range(placement.stage_of(rank, 0)))

    return max(work(rank) + around(rank) for rank in range(placement.num_ranks))


def smallest_activations(candidate: Candidate) -> float:
    """Bytes of one micro-batch on the first rank, which every schedule holds at once."""
    from ..costs.memory import activation_tables

    activation, _ = activation_tables(candidate.setup)
    return max(
        sum(sum(activation[stage]) for stage in candidate.setup.placement.stages_of(rank))
        for rank in range(candidate.setup.pipeline_parallel)
    )


def why_none(question: Question) -> str:
    """One sentence for a question without an answer: what is in the way, and the nearest way out."""
    found = list(candidates(question))
    if not found:
        return (
            f"no layout of {question.num_devices} devices divides --global-batch-size {question.global_batch_size}, "
            f"{question.model.num_layers} layers and {question.model.num_heads} heads; "
            f"--global-batch-size {question.num_devices} always can be divided"
        )
    least = min(found, key=lambda each: static_bytes(each.setup) + smallest_activations(each))
    needed = (static_bytes(least.setup) + smallest_activations(least)) / GIB
    factor = 2
    while needed / factor > question.memory_limit:
        factor *= 2
    return (
        f"the leanest configuration needs {needed:.0f} GiB on a device that has {question.memory_limit:.0f}; "
        f"take about {factor} times as many devices (--gpus {factor * question.num_devices}), or shorter sequences"
    )
