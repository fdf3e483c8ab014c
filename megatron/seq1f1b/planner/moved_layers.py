"""Layers of a configuration moved between its stages, one at a time, as long as its step becomes shorter.

Layers are spread for an equal load of all ranks, with a mean layer (stage_times.balanced_layers). Which stages may have
fewer than others depends on what the spread does not know: the kinds of layers, and what the first stage gathers and
the last one reduces beside its compute.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

from ..costs.training_setup import Moves, TrainingSetup
from .fitting import fits, fitted
from .space import Candidate, Question, lengths_of

# The most actions in the simulations of one round.
_MOST_ACTIONS = 60_000
# A move that gains less is none.
_LEAST_GAIN = 5e-4


def improved(candidate: Candidate, question: Question, seconds_of: Callable[[Candidate], float]) -> Candidate:
    """The candidate with layers moved, if that shortens its step; `seconds_of` gives the step of a candidate, inf if it
    does not fit."""
    best = candidate
    seconds = seconds_of(best)
    while _is_small(best.setup):
        moved = list(filter(question.accepts, _with_a_layer_moved(best, question)))
        times = list(map(seconds_of, moved))
        shortest = min(times, default=inf)
        if not shortest < (1 - _LEAST_GAIN) * seconds:
            break
        best = moved[times.index(shortest)]
        seconds = shortest
    return best


def _is_small(setup: TrainingSetup) -> bool:
    actions = 2 * setup.placement.num_stages * setup.shape.num_units
    return len([*_moves(setup)]) * actions <= _MOST_ACTIONS


def _moves(setup: TrainingSetup) -> Iterator[tuple[int, int]]:
    """Pairs of stages of which the first may give the second a layer: the first or the last stage is one of them, the
    other is the middle one of any rank."""
    placement = setup.placement
    if placement.num_stages == 1:
        return
    ends = (0, placement.num_stages - 1)
    of_ranks = (placement.stages_of(rank) for rank in range(placement.num_ranks))
    others = dict.fromkeys((*(stages[len(stages) // 2] for stages in of_ranks), *ends))
    for end in ends:
        for other in others:
            if other != end:
                yield end, other
                yield other, end


def _with_a_layer_moved(candidate: Candidate, question: Question) -> Iterator[Candidate]:
    """What fits of the candidate with one layer moved. With `--recompute-num-layers` none moves: it is the same number
    for all stages."""
    setup = candidate.setup
    if setup.recomputed_share < 1:
        return
    for source, destination in dict.fromkeys(_moves(setup)):
        layers = list(setup.layers_per_stage)
        layers[source] -= 1
        layers[destination] += 1
        if layers[source] < 1:
            continue
        moved = cut_anew(candidate, setup.but(layers_per_stage=tuple(layers)))
        found = None if moved is None else _fitted(moved, question)
        if found is not None:
            yield replace(candidate, setup=found)


def cut_anew(candidate: Candidate, setup: TrainingSetup) -> TrainingSetup | None:
    """The set-up with the lengths that training would have with these layers."""
    if len(setup.segments) == 1:
        return setup
    lengths = lengths_of(setup.but(segments=()), candidate.strategy, len(setup.segments))
    return None if lengths is None else setup.but(segments=lengths)


def _fitted(setup: TrainingSetup, question: Question) -> TrainingSetup | None:
    """The set-up with as much of it on the host as it needs; None if that does not suffice."""
    if setup.offloads:
        return fitted(setup.but(offloads=0.0, moves=Moves.UNITS), question.budget, setup.moves)
    return setup if fits(setup, question.budget.device) else None
