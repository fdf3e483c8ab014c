from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.seq1f1b.schedule import (
    COMPUTE_KINDS,
    FAMILIES,
    Action,
    Clock,
    Kind,
    Placement,
    Schedule,
    Shape,
    build,
    channels_of,
    lower,
    lower_rank,
    lowering,
    partition_state,
    simulate,
)
from megatron.seq1f1b.schedule.dependencies import message_needed, outcome

from .strategies import fixed, shapes

SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes())
def test_messages_surround_the_actions_they_serve(family, shape):
    """A rank that is lowered alone has the same ones."""
    schedule = build(family, shape)
    lowered = lower(schedule)
    for rank, (before, actions) in enumerate(zip(schedule.ranks, lowered.ranks, strict=True)):
        assert tuple(action for action in actions if action.kind in COMPUTE_KINDS) == before
        assert tuple(lower_rank(FAMILIES[family](shape), rank)) == actions
        posted, last = set(), None
        index_of = {outcome(action): index for index, action in enumerate(before)}
        computed = 0
        for action in actions:
            if action.kind in RECEIVES:
                kind = Kind.F if action.kind is Kind.RECV_F else Kind.B
                consumer = action._replace(kind=kind)
                # At least one compute action ahead, where there is one.
                assert computed <= max(index_of[consumer] - 1, 0)
                posted.add(consumer)
            elif action.kind in SENDS:
                kind = Kind.F if action.kind is Kind.SEND_F else Kind.B
                assert outcome(last) == action._replace(kind=kind)
            elif action.kind in COMPUTE_KINDS:
                assert (message_needed(action, shape) is not None) == (outcome(action) in posted)
                last = action
                computed += 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_of_a_large_step_makes_three_orders_only(family, monkeypatch):
    """To make and simulate the orders of 64 ranks can take seconds."""
    made, order = [], Clock.order
    monkeypatch.setattr(Clock, "order", lambda clock, rank: made.append(rank) or order(clock, rank))
    clock = FAMILIES[family](Shape(Placement(64, 2), 64, 16))
    assert len(lower_rank(clock, 31, one_queue=True)) == len(order(clock, 31)) + 2 * 2 * 2 * 64 * 16 + 4
    assert sorted(made) == [30, 31, 32]


def test_the_messages_of_a_step_are_found_once(monkeypatch):
    """Not by the rank that sends and again by the one that receives: that is most of the time of a plan."""
    found = []
    transfers = lowering._transfers
    monkeypatch.setattr(lowering, "_transfers", lambda *given: found.append(given[2:]) or transfers(*given))
    lower(build("1f1b", Shape(Placement(4), 8)))
    assert len(found) == len({*found}) == 6


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes())
def test_a_chunk_at_work_has_its_parameters(family, shape):
    """Where the state is partitioned; two chunks have them at most, and none at the end."""
    for actions in lower(build(family, shape)).ranks:
        partitioned, there = partition_state(actions), set()
        for action in partitioned:
            if action.kind is Kind.GATHER:
                assert action.stage not in there
                there.add(action.stage)
                assert len(there) <= 2
            elif action.kind is Kind.RELEASE:
                there.remove(action.stage)
            elif action.kind in (Kind.F, Kind.B, Kind.I):
                assert action.stage in there
        assert not there
        moves = (Kind.GATHER, Kind.RELEASE)
        assert [a for a in partitioned if a.kind not in moves] == [a for a in actions if a.kind not in moves]


@pytest.mark.parametrize("num_microbatches", [4, 64])
def test_breadth_first_gathers_once_each_way(num_microbatches):
    """However many micro-batches there are; the two chunks last in the forward still have their parameters."""
    lowered = lower(build("breadth-first", Shape(Placement(2, 4), num_microbatches, 2)))
    for actions in map(partition_state, lowered.ranks):
        gathered = Counter(action.stage // 2 for action in actions if action.kind is Kind.GATHER)
        assert gathered == {0: 2, 1: 2, 2: 1, 3: 1}


@fixed
@given(st.sampled_from(list(FAMILIES)), shapes())
def test_chunks_gather_before_and_reduce_after_their_actions(family, shape):
    for rank, actions in enumerate(lower(build(family, shape)).ranks):
        for stage in shape.placement.stages_of(rank):
            compute = [i for i, a in enumerate(actions) if a.kind in COMPUTE_KINDS and a.stage == stage]
            assert actions.count(Action(Kind.GATHER, stage)) == 1
            assert actions.count(Action(Kind.REDUCE, stage)) == 1
            reduce = actions.index(Action(Kind.REDUCE, stage))
            assert actions.index(Action(Kind.GATHER, stage)) < compute[0] and reduce > compute[-1]
            between = [a for a in actions[compute[-1] + 1 : reduce] if a.kind in (Kind.B, Kind.W)]
            is_at_the_end = not any(a.kind in COMPUTE_KINDS for a in actions[reduce:])
            assert len(between) == stage % shape.num_ranks or (is_at_the_end and len(between) < shape.num_ranks)


def test_all_ranks_reduce_and_gather_at_about_the_same_time():
    """To within two forwards and backwards, where the first and the last to end a chunk are farther apart."""
    schedule = build("breadth-first", Shape(Placement(4, 3), 8))
    lowered, ranks = lower(schedule).ranks, simulate(schedule).ranks
    for kind, chunk in ((Kind.GATHER, 2), (Kind.REDUCE, 2), (Kind.REDUCE, 1)):
        times = []
        for rank, spans in enumerate(ranks):
            before = lowered[rank][: lowered[rank].index(Action(kind, 4 * chunk + rank))]
            times.append(max((span.end for span in spans if span.action in before), default=0.0))
        assert max(times) - min(times) <= 2, (kind, chunk, times)
    ends = [max(span.end for span in spans if span.action.stage >= 8) for spans in ranks]
    assert max(ends) - min(ends) > 4


@fixed
@given(shapes())
def test_channels_that_share_a_communicator_never_meet_on_a_rank(shape):
    for rank in range(shape.num_ranks):
        channels = set(channels_of(shape.placement, rank).values())
        assert len({channel.communicator for channel in channels}) == len(channels)


def test_an_order_whose_messages_nobody_sends_is_refused():
    schedule = build("1f1b", Shape(Placement(2), 2))
    broken = Schedule(schedule.shape, (schedule.ranks[0][1:], schedule.ranks[1]))
    with pytest.raises(ValueError, match="rank 1 needs messages that rank 0 does not send"):
        lower(broken)
