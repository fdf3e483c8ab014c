"""Orders of the families: valid for every size, with the warm-ups and bubbles of the papers, and Megatron's own; the
worked example of docs/schedules.md."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.pipeline_parallel import schedules

from megatron.seq1f1b.schedule import (
    FAMILIES,
    Action,
    Costs,
    Kind,
    Placement,
    Shape,
    build,
    families,
    peak_memory,
    simulate,
    validate,
)
from megatron.seq1f1b.schedule.clock import smallest_group

from .strategies import fixed, full_groups, shapes

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


def idle(schedule, costs):
    """Idle time of a rank, from step start to step end; equal on all ranks for equal costs."""
    timeline = simulate(schedule, costs)
    return timeline.makespan - timeline.busy(0)


def peaks(schedule):
    return peak_memory(schedule, Costs.uniform(schedule.shape))


def forwards_before_first_backward(actions):
    return next(index for index, action in enumerate(actions) if action.kind is not F)


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes())
def test_every_family_is_valid_for_every_size(family, shape):
    validate(build(family, shape))


@fixed
@given(shapes(equal=True, chunks=1))
def test_warm_up_of_1f1b(shape):
    ranks, k, units = shape.num_ranks, shape.num_segments, shape.num_units
    schedule = build("1f1b", shape)
    for rank, actions in enumerate(schedule.ranks):
        warm_up = min(ranks - rank - 2 + k, units)
        # The pair after the warm-up starts with a forward, if there is one left.
        assert forwards_before_first_backward(actions) == min(warm_up + 1, units)
        steady = [action.kind for action in actions[warm_up : 2 * units - warm_up]]
        assert steady == [F, B] * (units - warm_up)
    assert peaks(schedule) == [min(ranks - rank - 1 + k, units) for rank in range(ranks)]


@fixed
@given(full_groups(least_chunks=2))
def test_warm_up_of_interleaved_1f1b(shape):
    ranks, chunks, k, group = shape.num_ranks, shape.num_chunks, shape.num_segments, smallest_group(shape)
    for rank, actions in enumerate(build("1f1b", shape).ranks):
        warm_up = (chunks - 1) * group + 2 * (ranks - rank - 1) + k - 1
        assert forwards_before_first_backward(actions) == min(warm_up + 1, chunks * shape.num_units)


@fixed
@given(shapes(equal=True, styles=["looped"]))
def test_backwards_follow_the_groups_with_segments_reversed(shape):
    k, microbatches = shape.num_segments, smallest_group(shape) // shape.num_segments
    for rank, actions in enumerate(build("1f1b", shape).ranks):
        chunks = shape.placement.stages_of(rank)
        if len(chunks) == 1:
            forward = [(chunks[0], m, s) for m in range(shape.num_microbatches) for s in range(k)]
        else:
            forward = [
                (stage, m, s)
                for first in range(0, shape.num_microbatches, microbatches)
                for stage in chunks
                for m in range(first, min(first + microbatches, shape.num_microbatches))
                for s in range(k)
            ]
        mirror = dict(zip(chunks, reversed(chunks), strict=True))
        backward = [(mirror[stage], m, k - 1 - s) for stage, m, s in forward]
        assert [action.unit for action in actions if action.kind is F] == forward
        assert [action.unit for action in actions if action.kind is B] == backward


ENOUGH = shapes(equal=True, styles=["looped"]).filter(lambda shape: shape.num_units >= shape.num_ranks)
SIZES = [
    ("gpipe", shapes(equal=True, chunks=1)),
    ("1f1b", shapes(equal=True, chunks=1)),
    ("1f1b", full_groups()),
    ("breadth-first", ENOUGH),
]


@pytest.mark.parametrize("family, sizes", SIZES, ids=["gpipe", "1f1b", "interleaved", "breadth-first"])
@fixed
@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_the_bubble_is_one_action_of_each_kind_for_a_rank(family, sizes, data, f, i):
    """Of one chunk, so C times less than with one chunk for equal work."""
    shape = data.draw(sizes)
    assert idle(build(family, shape), Costs.uniform(shape, f, i, 0)) == (shape.num_ranks - 1) * (f + i)


@fixed
@given(full_groups(least_groups=2), st.integers(1, 3))
def test_bubble_of_zb_h1(shape, unit):
    # (P-1)(F+I-W), as soon as there are as many units as fit in flight; full groups for several chunks.
    bubble = idle(build("zb-h1", shape), Costs.uniform(shape, unit, unit, unit))
    assert bubble == (shape.num_ranks - 1) * unit


@fixed
@given(shapes(equal=True))
def test_zb_h1_splits_backwards_and_holds_as_much_as_1f1b(shape):
    one_f_one_b, zero_bubble = build("1f1b", shape), build("zb-h1", shape)
    assert max(peaks(zero_bubble)) <= max(peaks(one_f_one_b))
    for actions in zero_bubble.ranks:
        inputs = [action.unit for action in actions if action.kind is I]
        weights = [action.unit for action in actions if action.kind is W]
        assert inputs == weights and not any(action.kind is B for action in actions)
    if shape.num_chunks == 1:
        assert idle(zero_bubble, Costs.uniform(shape)) <= idle(one_f_one_b, Costs.uniform(shape))


@pytest.mark.parametrize("chunks", [2, 3, 4, 5, 8, 10])
def test_any_number_of_chunks_in_a_v_has_a_small_bubble(chunks):
    """Where stages that share ticks leave a third of the time idle."""
    assert simulate(build("1f1b", Shape(Placement(4, chunks, "v"), 16, 4))).bubble_ratio < 0.04


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_v_shaped_1f1b_beats_one_chunk_at_the_same_memory(k):
    v, one = Shape(Placement(8, 2, "v"), 16, k), Shape(Placement(8), 16, k)
    schedule = build("1f1b", v)
    # A unit of one of two chunks is half of a unit of one chunk, in memory and in time.
    assert max(peaks(schedule)) <= 2 * max(peaks(build("1f1b", one)))
    assert idle(schedule, Costs.uniform(v, 1, 1, 1)) < 2 * idle(build("1f1b", one), Costs.uniform(one, 1, 1, 1))


@fixed
@given(shapes(equal=True))
def test_breadth_first_runs_chunk_after_chunk(shape):
    for actions in build("breadth-first", shape).ranks:
        forward = [action.stage for action in actions if action.kind is F]
        backward = [action.stage for action in actions if action.kind is B]
        assert forward == sorted(forward)
        assert backward == sorted(backward, reverse=True)


def megatron_order(ranks, rank, chunks, microbatches):
    """Warm-up forwards, pairs, cool-down, from Megatron's own table and count."""
    table = schedules.get_schedule_table(microbatches, chunks, ranks)
    stages = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    communicator = SimpleNamespace(pp_group=stages, virtual_pipeline_model_parallel_size=chunks)
    total, _, warm_up, _ = schedules.get_pp_rank_microbatches(
        microbatches, chunks, ranks, p2p_communicator=communicator
    )
    forward = [Action(Kind.F, chunk * ranks + rank, m, 0) for m, chunk in table]
    backward = [Action(Kind.B, (chunks - 1 - chunk) * ranks + rank, m, 0) for m, chunk in table]
    order = forward[:warm_up]
    for pair in range(total - warm_up):
        order += [forward[warm_up + pair], backward[pair]]
    return order + backward[total - warm_up :]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_interleaved_is_megatrons(ranks, chunks, groups):
    schedule = build("1f1b", Shape(Placement(ranks, chunks), ranks * groups))
    for rank in range(ranks):
        assert list(schedule.ranks[rank]) == megatron_order(ranks, rank, chunks, ranks * groups)


TEXT = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")


def example():
    source = re.search(r"```python\n(def eager_1f1b.*?)```", TEXT, re.DOTALL)[1]
    assert len(source.splitlines()) <= 60
    names = dict(vars(families))
    exec(source, names)
    return names["eager_1f1b"]


EAGER = example()


@fixed
@given(shapes(equal=True, chunks=1))
def test_the_example_is_valid_and_warms_up_as_it_says(shape):
    schedule = EAGER(shape).schedule()
    validate(schedule)
    for rank, actions in enumerate(schedule.ranks):
        warm_up = 2 * (shape.num_ranks - rank - 1) + shape.num_segments - 1
        assert forwards_before_first_backward(actions) == min(warm_up + 1, shape.num_units)


def test_zb_h1_holds_on_all_ranks_what_1f1b_holds_on_the_first():
    shape = Shape(Placement(8), 16, 4)
    assert peaks(build("1f1b", shape)) == [11, 10, 9, 8, 7, 6, 5, 4]
    assert peaks(build("zb-h1", shape)) == [11] * 8


def test_the_example_hides_messages():
    shape = Shape(Placement(8), 16, 4)
    costs = Costs.uniform(shape, message=0.5)
    assert simulate(EAGER(shape).schedule(), costs).bubble_ratio < simulate(build("1f1b", shape), costs).bubble_ratio
