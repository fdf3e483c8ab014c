"""The lowered schedule in simulated time."""

from dataclasses import replace
from itertools import pairwise

import pytest

from megatron.seq1f1b.planning.simulator.lowered import execute_lowered
from megatron.seq1f1b.schedule import MOVE_KINDS, Costs, Kind, Placement, Schedule, Shape, build, lower, moved, simulate

SHAPE = Shape(Placement(2), 3)


def spans_of(timeline, kind):
    return [span for spans in timeline.ranks for span in spans if span.action.kind is kind]


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "zb-h1", "breadth-first"])
@pytest.mark.parametrize("chunks, style", [(1, "looped"), (2, "looped"), (2, "v")])
@pytest.mark.parametrize("message", [0.0, 0.3])
def test_quick_messages_arrive_as_if_nothing_stood_in_their_way(family, chunks, style, message):
    shape = Shape(Placement(3, chunks, style), 4, 2)
    costs = Costs.uniform(shape, message=message)
    schedule = build(family, shape)
    assert execute_lowered(lower(schedule), costs).ranks == simulate(schedule, costs).ranks


@pytest.mark.parametrize(
    "forward, message, starts, at_once",
    [(1.0, 3.0, [4.0, 7.0], [4.0, 5.0]), (5.0, 2.0, [3.0, 8.0], [3.0, 8.0])],
    ids=["messages follow each other", "the second is received from the first forward on"],
)
def test_messages_of_a_channel_wait(forward, message, starts, at_once):
    """Rank 0 feeds a channel with two forwards of one second each."""
    shape = Shape(Placement(2), 2)
    costs = replace(Costs.uniform(shape, w=0.0), f=((1.0,), (forward,)), message_f=((message,), (0.0,)))
    schedule = build("gpipe", shape)
    for timeline, expected in ((execute_lowered(lower(schedule), costs), starts), (simulate(schedule, costs), at_once)):
        assert [span.start for span in timeline.ranks[1] if span.action.kind is Kind.F] == expected


def test_gradients_are_reduced_beside_compute():
    shape = Shape(Placement(2, 2), 2)
    costs = Costs.uniform(shape)
    schedule = lower(build("breadth-first", shape))
    without = execute_lowered(schedule, costs)
    timeline = execute_lowered(schedule, costs, {Kind.GATHER: ((1.5,),) * 4, Kind.REDUCE: ((2.0,),) * 4})
    assert spans_of(timeline, Kind.F)[0].start == 1.5
    assert len(spans_of(timeline, Kind.REDUCE)) == len(spans_of(timeline, Kind.GATHER)) == 4
    # Only the last reduction of a rank is not hidden.
    assert timeline.makespan <= without.makespan + 1.5 + 2 * 2.0
    assert all(list(spans) == sorted(spans, key=lambda span: span.start) for spans in timeline.ranks)


@pytest.mark.parametrize("family, chunks", [("gpipe", 1), ("1f1b", 2), ("zb-h1", 1)])
@pytest.mark.parametrize("seconds", [0.01, 0.9, 5.0])
def test_copies_run_beside_compute_one_after_the_other(family, chunks, seconds):
    """Where they take less than an action they cost nothing; a backward waits for what is not back."""
    shape = Shape(Placement(2, chunks), 4, 4)
    costs, plain = Costs.uniform(shape), build(family, shape)
    schedule = moved(plain, 1.0)
    copies = ((seconds,) * 4,) * shape.num_stages
    timeline = execute_lowered(lower(schedule), costs, dict.fromkeys(MOVE_KINDS, copies))
    least = simulate(plain, costs).makespan
    assert timeline.makespan == pytest.approx(least) if seconds < 1 else timeline.makespan > least
    for order, spans in zip(schedule.ranks, timeline.ranks, strict=True):
        span_of = {span.action: span for span in spans}
        assert set(span_of) == set(order)
        for kind in MOVE_KINDS:
            lane = [span_of[action] for action in order if action.kind is kind]
            assert all(before.end <= after.start for before, after in pairwise(lane))
        for action in order:
            if action.kind is Kind.RELOAD:
                back = span_of[action]
                assert span_of[action._replace(kind=Kind.OFFLOAD)].end <= back.start
                backward = span_of.get(action._replace(kind=Kind.B)) or span_of[action._replace(kind=Kind.I)]
                assert back.end <= backward.start


def test_a_schedule_that_cannot_end_is_a_mistake():
    schedule = lower(build("1f1b", SHAPE))
    wrong = Schedule(SHAPE, (schedule.ranks[0], tuple(reversed(schedule.ranks[1]))))
    with pytest.raises(ValueError, match="cannot run to its end"):
        execute_lowered(wrong, Costs.uniform(SHAPE))
