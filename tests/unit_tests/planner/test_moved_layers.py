"""Layers move between stages as long as that shortens the step."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.planner import moved_layers
from megatron.seq1f1b.planner.search import Search, predict_candidate
from megatron.seq1f1b.planner.space import Candidate
from megatron.seq1f1b.schedule import Placement
from unit_tests.planner.question import candidates, small


def spread(layers, segments=2, strategy="balanced", memory_gib=16):
    """A question, and a candidate of two pipeline ranks with these layers."""
    question = small(memory_gib=memory_gib)
    (found,) = {
        replace(each.setup, segments=()): each
        for each in candidates(question)
        if each.setup.placement == Placement(2)
        and (each.setup.family, each.setup.recompute, each.strategy) == ("1f1b", "none", strategy)
        and len(each.setup.segments) == segments
        and (each.setup.tensor_parallel, each.setup.context_parallel, each.setup.micro_batch_size) == (2, 1, 1)
    }.values()
    setup = moved_layers.cut_anew(found, found.setup.but(layers_per_stage=layers))
    assert setup is not None
    return question, Candidate(setup, strategy)


@pytest.mark.parametrize("segments, strategy", [(1, "even"), (2, "balanced"), (4, "even")])
def test_the_best_of_all_spreads_is_found(segments, strategy):
    question, candidate = spread((5, 1), segments, strategy)
    seconds_of = Search(question).seconds_if_it_fits
    all_spreads = [spread((first, 6 - first), segments, strategy)[1] for first in range(1, 6)]
    found = moved_layers.improved(candidate, question, seconds_of)
    assert seconds_of(found) == min(map(seconds_of, all_spreads)) < seconds_of(candidate)
    assert found in all_spreads  # with the lengths that such layers have


def test_what_does_not_fit_is_no_improvement():
    question, candidate = spread((1, 5))
    plan = predict_candidate(candidate, question)
    tight = replace(question, memory_gib=plan.memory_gib)
    seconds_of = Search(tight).seconds_if_it_fits
    found = moved_layers.improved(candidate, tight, seconds_of)
    assert seconds_of(found) < seconds_of(candidate) and predict_candidate(found, tight).memory_gib <= plan.memory_gib
    none_fits = replace(question, memory_gib=0.5 * plan.memory_gib)
    assert moved_layers.improved(candidate, none_fits, Search(none_fits).seconds_if_it_fits) == candidate


def test_long_steps_and_parts_of_stages_stay(monkeypatch):
    question, candidate = spread((5, 1))
    seconds_of = Search(question).seconds_if_it_fits
    of_parts = Candidate(candidate.setup.but(recompute="full", recomputed_share=0.5), "balanced")
    assert moved_layers.improved(of_parts, question, seconds_of) == of_parts
    monkeypatch.setattr(moved_layers, "_MOST_ACTIONS", 10)
    assert moved_layers.improved(candidate, question, seconds_of) == candidate
