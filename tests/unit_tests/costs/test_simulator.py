"""The lowered schedule in simulated time; the predicted step: laws that hold on any machine, and long steps, predicted
from short ones, as simulated."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron.seq1f1b.costs import simulator
from megatron.seq1f1b.costs.execution import execute_lowered
from megatron.seq1f1b.costs.host_link import LayersOnLink
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.simulator import extended, is_extended, predict
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.schedule import FAMILIES, MOVE_KINDS, Kind, Placement, Schedule, Shape, build, lower, moved
from megatron.seq1f1b.schedule.cost_tables import Costs, peak_memory
from megatron.seq1f1b.schedule.timing import simulate


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
    kinds = [span.action.kind for spans in timeline.ranks for span in spans]
    assert next(span.start for span in timeline.ranks[0] if span.action.kind is Kind.F) == 1.5
    assert kinds.count(Kind.REDUCE) == kinds.count(Kind.GATHER) == 4
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
    shape = Shape(Placement(2), 3)
    first, second = lower(build("1f1b", shape)).ranks
    with pytest.raises(ValueError, match="cannot run to its end"):
        execute_lowered(Schedule(shape, (first, tuple(reversed(second)))), Costs.uniform(shape))


MACHINE = read_machine("a100-80gb")
MODEL = ModelShape(32, 4096, 16384, 32, 128, 32768)
SETUP = TrainingSetup(MODEL, 32768, 8, 1, 8, placement=Placement(4), sequence_parallel=True, distributed_optimizer=True)


def test_segments_take_less_memory_and_leave_a_smaller_bubble():
    whole, cut = predict(SETUP, MACHINE), predict(replace(SETUP, segments=(8192,) * 4), MACHINE)
    assert cut.bubble < whole.bubble
    assert max(m.activations for m in cut.memory) < 0.5 * max(m.activations for m in whole.memory)


def test_full_recomputation_costs_time_and_saves_memory():
    kept, repeated = predict(SETUP, MACHINE), predict(replace(SETUP, recompute="full"), MACHINE)
    assert 1.2 < repeated.seconds / kept.seconds < 1.4
    assert max(m.total for m in repeated.memory) < 0.5 * max(m.total for m in kept.memory)
    between = predict(replace(SETUP, recompute="all but attention"), MACHINE)
    assert kept.seconds < between.seconds < repeated.seconds
    for smaller, larger in ((repeated, between), (between, kept)):
        assert max(m.total for m in smaller.memory) < max(m.total for m in larger.memory)


def test_the_sharded_optimizer_takes_its_part_only():
    whole, sharded = (
        predict(replace(SETUP, data_parallel=4, distributed_optimizer=flag), MACHINE) for flag in (False, True)
    )
    assert sharded.memory[0].optimizer == pytest.approx(whole.memory[0].optimizer / 4)
    assert sharded.ends[0].update < whole.ends[0].update


def measured(family, shape, costs):
    schedule = build(family, shape)
    timeline = simulate(schedule, costs)
    return [timeline.makespan, timeline.bubble_ratio * timeline.makespan, *peak_memory(schedule, costs)]


LONG = [(family, *sizes) for family in FAMILIES for sizes in ((4, 1, 57, 3), (3, 1, 61, 2), (2, 2, 31, 4))]


@pytest.mark.parametrize("family, ranks, chunks, microbatches, segments", LONG)
def test_a_long_step_is_as_simulated(family, ranks, chunks, microbatches, segments, monkeypatch):
    monkeypatch.setattr(simulator, "_MOST_ACTIONS", 0)
    shape = Shape(Placement(ranks, chunks), microbatches, segments)
    draw = random.Random(1).uniform
    rows = [[draw(1, 2) for _ in range(segments)] for _ in range(shape.num_stages)]
    costs = Costs.from_mapping(shape, {"f": rows, "i": 1.3, "w": 0.7})
    built = []

    def short(count):
        built.append(count)
        return measured(family, Shape(shape.placement, count, segments), costs)

    found = extended(shape, short)
    assert max(built) < microbatches
    assert found == pytest.approx(measured(family, shape, costs))


def test_a_step_is_extended_only_where_that_is_shorter(monkeypatch):
    monkeypatch.setattr(simulator, "_MOST_ACTIONS", 0)
    for microbatches in range(1, 80):
        built: list[int] = []
        shape = Shape(Placement(4), microbatches, 4)

        def measured_in(count, built=built):
            built.append(count)
            return [1.0 + count]

        assert extended(shape, measured_in) == pytest.approx([1.0 + microbatches])
        assert sum(built) <= microbatches
        assert is_extended(shape) == (built != [microbatches])


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("ranks, style, segments, seed", [(8, "v", 8, 24), (8, "v", 8, 1), (6, "looped", 4, 11)])
def test_stages_of_unequal_costs_take_longer_to_settle(family, ranks, style, segments, seed, monkeypatch):
    """The growth of short steps alone would be 2 % off."""
    monkeypatch.setattr(simulator, "_MOST_ACTIONS", 0)
    shape, draw = Shape(Placement(ranks, 2, style), 100, segments), random.Random(seed).uniform
    rows = {name: [[draw(0.8, 1.3)] * segments for _ in range(shape.num_stages)] for name in "fiw"}
    costs = Costs.from_mapping(shape, rows)
    found = extended(shape, lambda count: measured(family, Shape(shape.placement, count, segments), costs)[:1])
    assert found[0] == pytest.approx(measured(family, shape, costs)[0], rel=0.01)


def test_layer_by_layer_copies_run_within_forwards_and_backwards():
    """Of a unit with four layers: a forward waits until two are left, a backward for the last that comes back."""
    shape = Shape(Placement(1), 3)
    costs, plain = Costs.uniform(shape, f=4.0, i=4.0, w=4.0), build("gpipe", shape)
    schedule = lower(moved(plain, 1.0, by_layer=True))
    layers = LayersOnLink((4,), 2)

    def end(copy):
        return execute_lowered(schedule, costs, dict.fromkeys(MOVE_KINDS, ((copy,),)), layers=layers).makespan

    assert end(4.0) == simulate(plain, costs).makespan
    # The first forward has left but for a half one second after its first layer: 1 + 8 - 4 = 5.
    spans = execute_lowered(schedule, costs, dict.fromkeys(MOVE_KINDS, ((8.0,),)), layers=layers).ranks[0]
    assert next(span.end for span in spans if span.action.kind is Kind.F) == 5.0
    assert end(8.0) > end(4.0)
