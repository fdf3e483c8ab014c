"""A forward beside a backward: orders with pairs, their text, their checks, and their messages."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.seq1f1b.files.schedule_file import read_schedule, write_schedule
from megatron.seq1f1b.schedule import (
    MOVE_KINDS,
    PAIRED,
    Costs,
    Kind,
    Placement,
    Schedule,
    ScheduleError,
    Shape,
    build,
    lower,
    lower_rank,
    lowering,
    moved,
    simulate,
    validate,
    with_pairs,
)
from megatron.seq1f1b.schedule.moves import AHEAD

from .channels import execute
from .strategies import any_order, fixed, shapes

families = st.sampled_from(sorted(PAIRED))


def read(text, tmp_path):
    """The schedule of a file."""
    path = tmp_path / "schedule.csv"
    path.write_text(text.replace(" ", ","))
    return read_schedule(path)


def test_the_order_of_the_docstring(tmp_path):
    schedule = PAIRED["1f1b"](Shape(Placement(2), 3, 2)).schedule()
    assert str(schedule).splitlines() == [
        "rank 0: 0F0.0 0F0.1 0F1.0 0F1.1 0F2.0|0B0.1 0F2.1|0B0.0 0B1.1 0B1.0 0B2.1 0B2.0",
        "rank 1: 1F0.0 1F0.1 1F1.0|1B0.1 1F1.1|1B0.0 1F2.0|1B1.1 1F2.1|1B1.0 1B2.1 1B2.0",
    ]
    write_schedule(schedule, tmp_path / "pairs.csv")
    assert read_schedule(tmp_path / "pairs.csv") == schedule


@fixed
@given(families, shapes())
def test_families_alternate_beside_each_other(family, shape):
    """Every forward that a backward follows in the steady state has it beside it; nothing waits for ever."""
    clock = PAIRED[family](shape)
    schedule = clock.schedule()
    validate(schedule)
    assert execute(lower(schedule)) == simulate(schedule)
    for order in schedule.ranks:
        assert clock.pairs_in(order) == schedule.pairs_in(order)


@pytest.mark.parametrize("ranks, chunks, style", [(1, 1, "looped"), (2, 1, "looped"), (4, 2, "looped"), (4, 2, "v")])
def test_a_long_step_is_almost_all_pairs(ranks, chunks, style):
    shape = Shape(Placement(ranks, chunks, style), 16, 4)
    schedule = PAIRED["1f1b"](shape).schedule()
    units = shape.num_units * chunks
    for rank, order in enumerate(schedule.ranks):
        num_pairs = len([each for each in order if each in schedule.paired])
        assert num_pairs > 0.85 * units
        if chunks == 1:
            assert num_pairs == units - 4 - 2 * (ranks - 1 - rank)
    timeline = simulate(schedule, Costs.uniform(shape))
    assert timeline.bubble_ratio < 0.08
    assert timeline.busy(0) == 3 * units


@fixed
@given(families, shapes(ranks=5, microbatches=5, segments=4, chunks=3), st.sampled_from([0, 1]), st.floats(0, 3))
def test_no_family_hangs_on_one_queue(family, shape, buffered, message):
    """By nominal times or by ticks, and where each message is waited for."""
    clock = PAIRED[family](shape)
    costs = Costs.uniform(shape, message=message)
    schedule = clock.schedule()

    def lowered(**options):
        ranks = tuple(tuple(lower_rank(clock, rank, **options)) for rank in range(shape.num_ranks))
        return Schedule(shape, ranks, schedule.paired)

    for simulated in (10**6, 0):
        with mock.patch.object(lowering, "_MOST_SIMULATED", simulated):
            execute(lowered(one_queue=True), costs, one_queue=True, buffered=buffered)
            execute(lowered(in_turn=True), costs, in_turn=True, buffered=buffered)


counts = pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])


def any_shape(random):
    placement = Placement(random.randint(1, 4), random.randint(1, 2), random.choice(["looped", "v"]))
    return Shape(placement, random.randint(1, 3), random.randint(1, 3))


def run_on_any_queues(random, schedule):
    """On channels that block, with random durations: on queues that no streams share, on one, and in turn. Any number
    of queues between waits for less than one does."""
    shape = schedule.shape
    costs = [[[random.uniform(0.1, 3) for _ in range(shape.num_segments)] for _ in range(shape.num_stages)]] * 4
    costs = Costs.from_mapping(shape, dict(zip(("f", "i", "w", "message"), costs, strict=True)))
    assert execute(lower(schedule)) == simulate(schedule)
    for buffered in (0, 1):
        execute(lower(schedule, one_queue=True), costs, buffered=buffered)
        execute(lower(schedule, one_queue=True), costs, one_queue=True, buffered=buffered)
        execute(lower(schedule, in_turn=True), costs, in_turn=True, buffered=buffered)


@counts
def test_random_orders_with_pairs_run(count):
    random = Random(count)
    found = 0
    for _ in range(count):
        schedule = with_pairs(any_order(random, any_shape(random)))
        found += len(schedule.paired)
        validate(schedule)
        run_on_any_queues(random, schedule)
    assert found > count / 2


@counts
def test_random_pairs_run_or_are_named(count):
    """A valid order deadlocks if at all by its pairs: then the error names a pair, and so it does run without."""
    random = Random(count)
    refused = []
    ran = 0
    for _ in range(count):
        plain = any_order(random, any_shape(random))
        ahead = [each for order in plain.ranks for each in pairwise(order)]
        fit = [forward for forward, backward in ahead if may_be_pair(forward, backward)]
        schedule = replace(plain, paired=frozenset(forward for forward in fit if random.random() < 0.7))
        try:
            validate(schedule)
        except ScheduleError as error:
            refused.append(error)
            text = str(error)
            assert "the schedule deadlocks; each of these waits for the next, in a cycle:" in text
            assert any(f"{forward}|" in text.split("\n", 1)[1] for forward in schedule.paired)
            with pytest.raises(ValueError, match="cannot run to its end"):
                simulate(schedule)
            validate(plain)
        else:
            run_on_any_queues(random, schedule)
            ran += bool(schedule.paired)
    assert len(refused) > count / 20
    assert ran > count / 4


def may_be_pair(forward, backward):
    return forward.kind is Kind.F and backward.kind is Kind.B and forward.unit != backward.unit


@pytest.mark.parametrize("style", ["looped", "v"])
def test_the_pass_finds_the_pairs_of_a_family(style):
    shape = Shape(Placement(4, 2, style), 8, 4)
    schedule = PAIRED["1f1b"](shape).schedule()
    found = with_pairs(Schedule(shape, schedule.ranks))
    validate(found)
    assert len(found.paired) >= len(schedule.paired)


def test_plain_1f1b_waits_where_it_pairs():
    """A unit takes a pair from stage to stage each way, for which it warms up too little."""
    schedule = build("1f1b", Shape(Placement(4), 8, 1))
    paired = with_pairs(schedule)
    validate(paired)
    suited = PAIRED["1f1b"](schedule.shape).schedule()
    assert simulate(paired).makespan > 1.1 * simulate(suited).makespan


def test_messages_surround_both_of_a_pair():
    lowered = lower(PAIRED["1f1b"](Shape(Placement(2), 3, 2)).schedule())
    words = " ".join(map(str, lowered.ranks[0]))
    assert "0RECV_B0.0 0F2.0 0B0.1 0SEND_F2.0" in words
    for order in lowered.ranks:
        for index, action in enumerate(order):
            if action in lowered.paired:
                assert order[index + 1].kind is Kind.B


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0.0|0B0.0", "0F0.0 runs beside 0B0.0, which needs it"),
        ("0F0.0 0F0.1|0B0.0 0B0.1", "action 2: 0B0.0 comes before 0B0.1, which it needs: segments go backward"),
        ("0F0.0 0B0.0|0F1.0 0B1.0", "0B0.0 is paired with 0F1.0; a pair is a forward and a B or an I after it"),
        ("0F0.0 0F1.0|0F2.0 0B0.0 0B1.0 0B2.0", "0F1.0 is paired with 0F2.0"),
        ("0F0.0|0F1.0|0B0.0 0B1.0", "'0F0.0|0F1.0|0B0.0' is not an action or a pair of two, such as 2F3.1|2B1.0"),
        ("0F0.0 0F1.0|0X0.0 0B1.0", "cell 2: not an action: '0X0.0'"),
        ("0F0.0 0F1.0|0B0.0 0RELOAD1.0 0B1.0", "0RELOAD1.0 reloads activations that are not on the host"),
    ],
)
def test_what_is_wrong_with_a_pair_is_said(text, message, tmp_path):
    with pytest.raises(ScheduleError) as found:
        read(text, tmp_path)
    assert message in str(found.value)


def test_a_pair_is_whole(tmp_path):
    schedule = read("0F0.0 0OFFLOAD0.0 0RELOAD0.0 0F1.0|0B0.0 0B1.0", tmp_path)
    (order,) = schedule.ranks
    parted = (order[0], order[1], order[3], order[2], *order[4:])
    with pytest.raises(ScheduleError, match="action 3: 0RELOAD0.0 parts the two of a pair; put it before or behind"):
        validate(replace(schedule, ranks=(parted,)))


@fixed
@given(families, shapes(), st.floats(0.1, 1))
def test_moves_stand_between_pairs(family, shape, share):
    """With the pairs and messages of the schedule without moves."""
    plain = PAIRED[family](shape).schedule()
    schedule = moved(plain, share)
    validate(schedule)
    assert schedule.without_moves() == plain
    alone, together = (lower(each, one_queue=True) for each in (plain, schedule))
    assert together.without_moves().paired == plain.paired
    for rank, lowered in enumerate(together.ranks):
        assert alone.ranks[rank] == tuple(action for action in lowered if action.kind not in MOVE_KINDS)
        order = plain.places(rank)
        for number, place in enumerate(order):
            for action in place:
                back = action._replace(kind=Kind.RELOAD)
                if action.kind.facts.gives_input_gradient and back in lowered:
                    starts = [lowered.index(each[0]) for each in order[number - AHEAD - 1 : number]]
                    assert starts[0] < lowered.index(back) < starts[1]


def test_pairs_that_wait_for_each_other_are_named(tmp_path):
    """Rank 1 needs the forward in the pair of rank 0, which needs the backward in the pair of rank 1."""
    with pytest.raises(ScheduleError) as found:
        read("0F0.0 0F1.0|0B0.0 0B1.0\n1F0.0 1F1.0|1B0.0 1B1.0", tmp_path)
    lines = str(found.value).splitlines()
    assert "the schedule deadlocks; each of these waits for the next, in a cycle:" in lines[0]
    assert {*lines[1:3]} == {
        "rank 0: 0F1.0|0B0.0 needs 1B0.0 of rank 1, which runs in 1F1.0|1B0.0",
        "rank 1: 1F1.0|1B0.0 needs 0F1.0 of rank 0, which runs in 0F1.0|0B0.0",
    }
