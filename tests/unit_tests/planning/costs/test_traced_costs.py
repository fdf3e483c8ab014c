"""Costs of segments from a trace: what went into a simulated step comes out of its timeline."""

from itertools import accumulate, pairwise

import pytest

from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.stage_costs import CPU_CORE, AnalyticTime, action_costs, analytic_costs
from megatron.seq1f1b.planning.costs.traced_costs import TimedSegment, fit_time, read_traced_costs, traced_costs
from megatron.seq1f1b.schedule import Placement, Shape, Timeline, build, simulate, write_timeline

MODEL = ModelShape(4, 256, 1024, 4, 64, 512)
LAYERS = (3, 1)
LENGTHS = (3584, 1888, 1472, 1248)


def timeline(family: str, lengths=LENGTHS, told=LENGTHS) -> Timeline:
    """A step with the analytic costs of MODEL, as if it had been measured."""
    costs = action_costs(analytic_costs(MODEL, LAYERS, CPU_CORE), LAYERS, lengths)
    step = simulate(build(family, Shape(Placement(2), 3, len(lengths))), costs)
    meta = {} if told is None else {"segment_lengths": list(told)}
    return Timeline(step.shape, step.ranks, "s", meta)


@pytest.mark.parametrize(
    "family, lengths", [("1f1b", LENGTHS), ("zb-h1", LENGTHS), ("1f1b", (2048,) * 4)], ids=["1f1b", "zb-h1", "equal"]
)
def test_costs_are_those_that_the_step_was_made_of(family, lengths):
    costs, errors = traced_costs(timeline(family, lengths, lengths))
    for found, made in zip(costs, analytic_costs(MODEL, LAYERS, CPU_CORE), strict=True):
        for start, end in pairwise((0, *accumulate(lengths))):
            for part in ("forward", "backward", "weight"):
                assert getattr(found, part)(start, end) == pytest.approx(getattr(made, part)(start, end), rel=0.02)
    assert max(errors) < 0.01


@pytest.mark.parametrize(
    "time",
    [AnalyticTime(0.2, 1e-4, 1e-8), AnalyticTime(0.0, 1e-4, 1e-8), AnalyticTime(0.0, 0.0, 1e-8), AnalyticTime(0.3)],
    ids=str,
)
def test_fit_finds_the_parts_of_a_time(time):
    bounds = [(0, 900), (900, 1500), (1500, 1900), (1900, 2100)]
    fitted = fit_time([TimedSegment(end - start, start, time(start, end)) for start, end in bounds])
    assert fitted(300, 1000) == pytest.approx(time(300, 1000), rel=1e-6)


def test_no_part_of_a_time_is_negative():
    fitted = fit_time([TimedSegment(100, 0, 1.0), TimedSegment(200, 100, 1.5), TimedSegment(300, 300, 1.0)])
    assert min(fitted.fixed, fitted.per_token, fitted.per_pair) >= 0


@pytest.mark.parametrize(
    "told, num_stages, sentence",
    [(LENGTHS, 4, "it has 2 stages, the model 4"), (None, 2, "does not have the lengths of at least two segments")],
)
def test_a_trace_that_does_not_fit_is_an_error(tmp_path, told, num_stages, sentence):
    path = tmp_path / "trace.json"
    write_timeline(timeline("1f1b", told=told), path)
    with pytest.raises(ValueError, match=sentence):
        read_traced_costs(path, num_stages)
