"""Lowered schedules on channels as strict as those of NCCL, and on GPUs with one hardware queue."""

from itertools import product
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.seq1f1b.schedule import (
    FAMILIES,
    Costs,
    Kind,
    Placement,
    Schedule,
    Shape,
    build,
    lower,
    lower_rank,
    lowering,
    simulate,
    validate,
)

from .channels import HangError, execute
from .strategies import any_order, fixed, shapes

some = settings(fixed, max_examples=30)
small_shapes = shapes(ranks=5, microbatches=5, segments=4, chunks=3)


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes(), st.floats(0.01, 3))
def test_no_family_hangs_on_strict_channels(family, shape, message):
    schedule, costs = build(family, shape), Costs.uniform(shape, message=message)
    lowered = lower(schedule)
    assert execute(lowered) == simulate(schedule)
    # A channel carries one message at a time.
    assert execute(lowered, costs).makespan >= simulate(schedule, costs).makespan - 1e-9


@some
@given(st.randoms(use_true_random=False), st.integers(2, 4), st.integers(1, 2), st.sampled_from(["looped", "v"]))
def test_no_valid_order_hangs(random, ranks, chunks, style):
    shape = Shape(Placement(ranks, chunks, style), 3, 2)
    schedule = any_order(random, shape)
    validate(schedule)
    assert execute(lower(schedule)).makespan == simulate(schedule).makespan
    costs = [[[random.uniform(0.1, 3) for _ in range(2)] for _ in range(shape.num_stages)] for _ in range(4)]
    costs = Costs.from_mapping(shape, dict(zip(("f", "i", "w", "message"), costs, strict=True)))
    for buffered in (0, 1):
        execute(lower(schedule, one_queue=True), costs, one_queue=True, buffered=buffered)
        execute(lower(schedule, in_turn=True), costs, in_turn=True, buffered=buffered)


# Where orders by ticks, or by times without messages, cost from 3 % to 16 %; and the rest.
COSTLY = [("zb-h1", 8, 8, 1, 2, "looped"), ("zb-h1", 8, 16, 1, 4, "v"), ("zb-h1", 8, 8, 4, 4, "looped")]
COSTLY += [("1f1b", 4, 8, 4, 4, "v"), ("1f1b", 4, 8, 8, 2, "looped"), ("1f1b", 4, 8, 8, 4, "looped")]
PLACES = (1, "looped"), (2, "looped"), (2, "v"), (4, "looped"), (4, "v")
ALL = [(*sizes, *place) for *sizes, place in product(FAMILIES, (4, 8, 16), (8, 16, 64), (1, 4, 8), PLACES)]


@pytest.mark.parametrize(
    "family, ranks, microbatches, segments, chunks, style",
    [*COSTLY, *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in ALL if row not in COSTLY)],
)
def test_one_hardware_queue_costs_next_to_nothing(family, ranks, microbatches, segments, chunks, style):
    shape = Shape(Placement(ranks, chunks, style), microbatches, segments)
    schedule = build(family, shape)
    is_costly = (family, ranks, microbatches, segments, chunks, style) in COSTLY
    for message in (0.0, 0.05, 0.1) if is_costly else (0.1,):
        costs = Costs.uniform(shape, message=message)
        one_queue = execute(lower(schedule, one_queue=True), costs, one_queue=True).makespan
        assert one_queue <= 1.01 * execute(lower(schedule), costs).makespan


@pytest.mark.parametrize("simulated", [10**6, 0], ids=["nominal times", "ticks"])
@some
@given(st.sampled_from(list(FAMILIES)), small_shapes, st.sampled_from([0, 1]), st.floats(0, 3))
def test_no_family_hangs_on_one_hardware_queue_or_in_turn(simulated, family, shape, buffered, message):
    """Also without backwards. Steps of many actions go by ticks. More queues only take away what an operation waits
    for."""
    clock, costs = FAMILIES[family](shape), Costs.uniform(shape, message=message)

    def lowered(**options):
        return Schedule(shape, tuple(tuple(lower_rank(clock, rank, **options)) for rank in range(shape.num_ranks)))

    with mock.patch.object(lowering, "_MOST_SIMULATED", simulated):
        free, safe, in_turn = lowered(), lowered(one_queue=True), lowered(in_turn=True)
    timeline = execute(safe, costs, one_queue=True, buffered=buffered)
    assert timeline.makespan >= simulate(clock.schedule(), costs).makespan - 1e-9
    execute(in_turn, costs, in_turn=True, buffered=buffered)
    forwards = (tuple(a for a in rank if a.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F)) for rank in in_turn.ranks)
    execute(Schedule(shape, tuple(forwards)), costs, in_turn=True, buffered=buffered)
    for plain, *others in zip(free.ranks, safe.ranks, in_turn.ranks, strict=True):
        assert all(set(other) == set(plain) for other in others)


def test_the_channels_are_as_strict_as_they_should_be():
    for family, *sizes in (("1f1b", 4, 6, 3), ("zb-h1", 2, 4, 4), ("breadth-first", 2, 4, 4)):
        needs_another_order = lower(build(family, Shape(Placement(sizes[0], 2), *sizes[1:])))
        for condition in ("one_queue", "in_turn"):
            with pytest.raises(HangError):
                execute(needs_another_order, **{condition: True})
    lowered = lower(build("gpipe", Shape(Placement(2), 2)))
    actions = list(lowered.ranks[1])
    first, second = (i for i, a in enumerate(actions) if a.kind is Kind.RECV_F)
    actions[first], actions[second] = actions[second], actions[first]
    with pytest.raises(HangError, match="1RECV_F1.0 meets 0SEND_F0.0"):
        execute(Schedule(lowered.shape, (lowered.ranks[0], tuple(actions))))
    ranks = tuple(tuple(a for a in actions if a.kind is not Kind.RECV_B) for actions in lowered.ranks)
    with pytest.raises(HangError, match="rank 0 waits at 0B0.0"):
        execute(Schedule(lowered.shape, ranks))
