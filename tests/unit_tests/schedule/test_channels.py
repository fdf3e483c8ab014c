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
    dependencies,
    lower,
    parse_action,
    simulate,
    validate,
)

from .channels import HangError, execute

fixed = settings(derandomize=True, deadline=None, max_examples=120)
few = settings(fixed, max_examples=12)


@st.composite
def shapes(draw):
    placement = Placement(draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.sampled_from(["looped", "v"])))
    return Shape(placement, draw(st.integers(1, 12)), draw(st.integers(1, 8)))


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes())
def test_no_family_hangs_on_strict_channels_and_messages_for_free_cost_nothing(family, shape):
    schedule = build(family, shape)
    assert execute(lower(schedule)) == simulate(schedule)


@few
@given(shapes())
def test_auto_does_not_hang_either(shape):
    schedule = build("auto", shape)
    validate(schedule)
    assert execute(lower(schedule)) == simulate(schedule)


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes(), st.floats(0.01, 3))
def test_channels_that_carry_one_message_at_a_time_are_no_faster(family, shape, message):
    schedule, costs = build(family, shape), Costs.uniform(shape, message=message)
    assert execute(lower(schedule), costs).makespan >= simulate(schedule, costs).makespan - 1e-9


@fixed
@given(st.randoms(use_true_random=False), st.integers(2, 4), st.integers(1, 2), st.sampled_from(["looped", "v"]))
def test_no_valid_order_hangs(random, ranks, chunks, style):
    """Random orders without a cycle, far from any family."""
    shape = Shape(Placement(ranks, chunks, style), 3, 2)
    todo = {a for actions in build("1f1b", shape).ranks for a in actions}
    orders, done = [[] for _ in range(ranks)], set()
    while todo:
        action = random.choice(sorted(a for a in todo if all(need in done for need in dependencies(a, shape))))
        todo.remove(action)
        done.add(action)
        orders[shape.placement.rank_of(action.stage)].append(action)
    schedule = Schedule(shape, tuple(map(tuple, orders)))
    validate(schedule)
    assert execute(lower(schedule)).makespan == simulate(schedule).makespan


def schedule_that_needs_separate_communicators():
    """Rank 0 runs chunk 1 of micro-batch 0 before chunk 0 of micro-batch 1; ranks 1 and 2 do not."""
    text = """0F0.0 3F0.0 0F1.0 3F1.0 3B0.0 0B0.0 3B1.0 0B1.0
              1F0.0 1F1.0 4F0.0 4F1.0 4B0.0 1B0.0 4B1.0 1B1.0
              2F0.0 2F1.0 5F0.0 5F1.0 5B0.0 2B0.0 5B1.0 2B1.0"""
    ranks = tuple(tuple(map(parse_action, line.split())) for line in text.splitlines())
    schedule = Schedule(Shape(Placement(3, 2), 2), ranks)
    validate(schedule)
    return schedule


def test_one_serial_communicator_for_a_direction_would_hang():
    lowered = lower(schedule_that_needs_separate_communicators())
    execute(lowered)
    with pytest.raises(HangError, match="rank 1 waits at 1F1.0"):
        execute(lowered, communicator_of=lambda channel: (channel.payload, channel.destination > channel.source))


def test_a_receive_that_meets_another_message_is_an_error():
    lowered = lower(build("gpipe", Shape(Placement(2), 2)))
    actions = list(lowered.ranks[1])
    first, second = (i for i, a in enumerate(actions) if a.kind is Kind.RECV_F)
    actions[first], actions[second] = actions[second], actions[first]
    with pytest.raises(HangError, match="1RECV_F1.0 meets 0SEND_F0.0"):
        execute(Schedule(lowered.shape, (lowered.ranks[0], tuple(actions))))


def test_a_receive_that_is_missing_hangs():
    lowered = lower(build("1f1b", Shape(Placement(2), 1)))
    ranks = tuple(tuple(a for a in actions if a.kind is not Kind.RECV_B) for actions in lowered.ranks)
    with pytest.raises(HangError, match="rank 0 waits at 0B0.0"):
        execute(Schedule(lowered.shape, ranks))
