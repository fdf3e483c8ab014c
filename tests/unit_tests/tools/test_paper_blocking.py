"""Ranks that wait for every message."""

import pytest

from megatron.seq1f1b.schedule import Action, Costs, Kind, Placement, Schedule, Shape, build, simulate
from paper.blocking import execute_blocking


@pytest.mark.parametrize("kinds, w, ends", [("FB", 1, [7, 4.5]), ("FIW", 0.25, [5.25, 3.75])])
def test_one_rank_waits_for_the_messages_of_the_other(kinds, w, ends):
    """Forward, message, forward and backward, message, backward; a W runs beside the message before it."""
    shape = Shape(Placement(2), 1)
    schedule = Schedule(shape, tuple(tuple(Action(Kind(kind), stage, 0, 0) for kind in kinds) for stage in range(2)))
    timeline = execute_blocking(schedule, Costs.uniform(shape, f=1, i=1, w=w, message=0.5))
    assert [spans[-1].end for spans in timeline.ranks] == ends


@pytest.mark.parametrize(("ranks", "chunks"), [(4, 2), (4, 4), (8, 2)])
def test_interleaved_with_m_equal_p_runs_all_forwards_first(ranks, chunks):
    """As arXiv 2104.04473 ran it in figures 12 and 18, with batches of 12."""
    shape = Shape(Placement(ranks, chunks), ranks)
    costs = Costs.uniform(shape, message=0.25)
    timeline = execute_blocking(build("1f1b", shape), costs)
    for spans in timeline.ranks:
        kinds = [span.action.kind for span in spans]
        assert kinds == [Kind.F] * ranks * chunks + [Kind.B] * ranks * chunks
    assert simulate(build("breadth-first", shape), costs).makespan <= timeline.makespan


def test_a_schedule_that_needs_messages_ahead_is_refused():
    shape = Shape(Placement(4, 2), 5)
    with pytest.raises(ValueError, match="ranks that wait for every message cannot run this schedule to its end"):
        execute_blocking(build("1f1b", shape), Costs.uniform(shape))
