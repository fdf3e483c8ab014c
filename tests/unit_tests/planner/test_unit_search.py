"""Plans for sequences of unequal lengths: steps as training makes them, costs of each unit, memory of the longest."""

from dataclasses import replace
from itertools import chain
from math import inf

import pytest

from megatron.seq1f1b.costs.blocks import pairs
from megatron.seq1f1b.costs.execution import execute_lowered
from megatron.seq1f1b.costs.model_shape import Experts
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.stage_times import stage_rows
from megatron.seq1f1b.partition import Pack
from megatron.seq1f1b.planner import moved_layers
from megatron.seq1f1b.planner import search as search_of_one_length
from megatron.seq1f1b.planner.bounds import least_seconds
from megatron.seq1f1b.planner.packed_bounds import PackedBounds
from megatron.seq1f1b.planner.packed_steps import seen_by_units
from megatron.seq1f1b.planner.search_order import MOST_OVER
from megatron.seq1f1b.planner.space import Candidate, ParallelSizes
from megatron.seq1f1b.planner.unit_search import UnitSearch, draw
from megatron.seq1f1b.schedule import Costs, Shape, build, lower, peak_memory
from unit_tests.planner.question import MODEL, small

MIXTURE = replace(MODEL, experts=Experts(8, 2, 1024), expert_layers=tuple(range(6)))
HISTOGRAM = {100: 50, 1500: 10, 5000: 3, 8192: 1}


def search(histogram, **changes):
    return UnitSearch(small(**changes), histogram)


def candidate(found, unit_tokens, sizes=(1, 1, 4, 1), **changes):
    setup = found.average(unit_tokens).setup(ParallelSizes(*sizes), distributed_optimizer=True, **changes)
    return Candidate(setup, unit_tokens=unit_tokens)


def test_a_drawn_step_has_each_length_as_often_as_the_histogram():
    steps = draw({64: 3, 128: 1}, 512)
    assert [len(step) for step in steps] == [512, 512]
    assert sorted(chain(*steps)) == [64] * 768 + [128] * 256
    assert draw({64: 3, 128: 1}, 512) == steps


def test_processes_share_the_search(monkeypatch):
    found = search(HISTOGRAM, global_batch_size=8).best()
    assert len(found) == 5
    monkeypatch.setattr(search_of_one_length, "_ALONE", 20)
    assert UnitSearch(small(global_batch_size=8), HISTOGRAM, processes=2).best() == found


def test_an_early_end_is_near_the_best_and_has_a_bound(monkeypatch):
    exact = search(HISTOGRAM, global_batch_size=64)
    best, *_ = exact.best(1)
    assert exact.least_seconds == inf
    monkeypatch.setattr(search_of_one_length, "_ALONE", 10)
    monkeypatch.setattr(search_of_one_length, "_AFTER_FIRST", 0)
    early = search(HISTOGRAM, global_batch_size=64)
    found, *_ = early.best(1, exact_below=0.0)
    assert 0 < early.least_seconds < best.seconds <= found.seconds < MOST_OVER * best.seconds


def test_average_units_have_all_attention_of_their_sequences():
    """The average unit sees more than its own tokens; here that takes most of its time."""
    found = search({65536: 1}, global_batch_size=8, sequence_length=65536)
    asked = candidate(found, 8192, (1, 1, 1, 1))
    seconds = found.predict(asked).seconds
    assert 0.95 * seconds < least_seconds(asked.setup, found.question.machine) < seconds


@pytest.mark.parametrize("sizes", [(1, 1, 4, 1), (1, 1, 2, 2), (2, 2, 1, 1)])
@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_equal_sequences_take_what_segments_of_them_take(sizes, family):
    """As many units of each sequence, with the attention of the whole sequence."""
    found = search({8192: 1}, global_batch_size=8)
    plan = found.predict(candidate(found, 2048, sizes, family=family))
    setup = replace(plan.candidate.setup, segments=(2048,) * 4, longest=8192)
    expected = predict(setup, small().machine)
    assert plan.seconds == pytest.approx(expected.seconds, rel=1e-12)
    assert plan.bubble == pytest.approx(expected.bubble, rel=1e-9)
    for unit, segment in zip(plan.prediction.memory, expected.memory, strict=True):
        assert vars(unit) == pytest.approx(vars(segment), rel=1e-12)


def test_unequal_micro_batches_run_as_the_family_orders_them():
    """One sequence of four units and three packs of one, two stages, by hand: costs by micro-batch and segment."""
    found = search(HISTOGRAM, global_batch_size=4)
    asked = candidate(found, 2048, (1, 1, 2, 1))
    found.fullest = (8192, 2048, 1024, 2048)
    packed = found.packed(asked)
    setup = packed.setup_of(asked.setup, packed.fullest)
    shape = Shape.of(setup.placement, [1, 1, 4, 1])
    assert [len(packed.kinds[kind].lengths) for kind in packed.fullest] == [1, 1, 4, 1]
    schedule = packed.schedule(setup, packed.fullest)
    named = build("1f1b", shape)
    columns = Costs.uniform(Shape(shape.placement, 4, len(setup.segments)))
    steps = (execute_lowered(lower(schedule), columns), execute_lowered(lower(named), Costs.uniform(shape)))
    for ours, theirs in zip(*(step.ranks for step in steps), strict=True):
        assert [span[1:] for span in ours] == [span[1:] for span in theirs]
    assert peak_memory(schedule, columns) == peak_memory(named, Costs.uniform(shape))
    for rank, actions in enumerate(schedule.ranks):
        assert packed.rank_order(setup, packed.fullest, rank).actions == list(actions)


def test_units_see_all_pairs_of_their_sequences():
    lengths = [70, 50, 9, 200]
    seen = seen_by_units(Pack((3, 1, 2), (100, 100, 59)), lengths)
    assert seen == [pairs(0, 100, None), pairs(100, 200, None), pairs(0, 50, None) + pairs(0, 9, None)]
    assert sum(seen_by_units(Pack((0, 1), (64, 56)), lengths)) == pairs(0, 70, None) + pairs(0, 50, None)


def test_memory_is_that_of_a_step_with_the_longest_sequence():
    rare, often, never = (
        search({100: 10**6, 5000: 10**6} | extra, global_batch_size=8) for extra in ({8192: 1}, {8192: 10**6}, {})
    )
    assert max(map(max, rare.steps)) < 8192
    plans = [each.predict(candidate(each, 1024)).prediction for each in (rare, often, never)]
    # The allocator holds more back where more lengths are in flight.
    memory = [max(rank.total - rank.reserved for rank in plan.memory) for plan in plans]
    assert memory[0] == pytest.approx(memory[1], rel=0.02) and memory[2] < 0.95 * memory[0]


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_favourable_step_does_not_make_a_plan_fit(chunks):
    """Several chunks take units in groups; here the drawn step has the longest sequence where it needs least."""
    histogram = {256: 6000, 512: 2000, 1024: 1000, 2048: 500, 4096: 200, 8192: 100, 16384: 40}
    histogram |= {32: 40000, 64: 30000, 128: 20000}
    changes = {"model": replace(MODEL, num_layers=32), "num_devices": 8, "sequence_length": 16384}
    found = search(histogram, global_batch_size=256, memory_gib=6.5, **changes)
    sizes = ParallelSizes(tensor=1, context=1, pipeline=8, data=1)
    setups = [found.average(1024).setup(sizes, number, distributed_optimizer=True) for number in (1, chunks)]
    one, several = (Candidate(setup, unit_tokens=1024) for setup in setups)
    assert found.predict(several).memory_gib < found.predict(one).memory_gib < 6.5
    assert found.holds_longest(one) and not found.holds_longest(several)


def test_layers_move_to_where_the_units_of_the_steps_are_faster():
    found = search(HISTOGRAM, model=replace(MODEL, num_layers=9), global_batch_size=16)
    asked = candidate(found, 2048, (1, 1, 2, 2), layers_per_stage=(3, 6))
    moved = moved_layers.improved(asked, found.question, found.least_seconds_if_it_fits)
    assert moved.unit_tokens == 2048
    assert found.predict(moved).seconds < 0.95 * found.predict(asked).seconds


def test_the_best_units_fit_and_no_other_that_fits_is_faster():
    found = search(HISTOGRAM, global_batch_size=64, memory_gib=4)
    best, *others = found.best(3)
    assert all(each.memory_gib <= 4 and each.seconds >= best.seconds for each in others)
    for unit_tokens in found.unit_tokens():
        for sizes in ((1, 1, 4, 1), (1, 1, 2, 2), (2, 1, 2, 1)):
            plan = found.predict(candidate(found, unit_tokens, sizes))
            assert plan.memory_gib > 4 or plan.seconds >= best.seconds * 0.999


@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "mixture"])
def test_kinds_share_the_times_of_their_first_units(model):
    found = search(HISTOGRAM | {7000: 2, 8000: 3}, model=model, global_batch_size=64)
    setup = candidate(found, 1024, (1, 1, 2, 2), expert_parallel=2 if model is MIXTURE else 1).setup
    packed = found.packed(Candidate(setup, unit_tokens=1024))
    assert sum(len(kind.lengths) > 2 for kind in packed.kinds) > 2
    machine = found.question.machine
    work = PackedBounds(packed, machine).work_of_kinds(setup.layer_setup, setup.layers_per_stage)
    for kind, of_kind in enumerate(work):
        rows = stage_rows(packed.setup_of(setup, (kind,)), machine)
        assert of_kind.of_stages == pytest.approx([sum(map(sum, of_stage)) for of_stage in rows], rel=1e-12)
        assert of_kind.first_forward == [f[0] for f, _, _ in rows]
        assert of_kind.last_backward == [i[0] + w[0] for _, i, w in rows]


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "breadth-first"])
@pytest.mark.parametrize(("sizes", "chunks"), [((1, 1, 4, 1), 1), ((1, 1, 2, 2), 1), ((1, 1, 2, 2), 2)])
def test_no_step_is_shorter_than_its_bounds(family, sizes, chunks):
    """So what a search leaves out is no faster than what it has."""
    found = search(HISTOGRAM, global_batch_size=64)
    chosen = candidate(found, 2048, sizes, chunks=chunks, family=family)
    bounds = found.bounds(chosen)
    plan = found.predict(chosen)
    for orders, step in zip(found.packed(chosen).steps, plan.steps, strict=True):
        compute = max(bounds.by_compute(chosen.setup, order) for order in orders)
        in_time = max(bounds.in_time(chosen.setup, order) for order in orders)
        assert 0.5 * step.seconds < compute <= in_time * (1 + 1e-9) <= step.seconds * (1 + 2e-9)
        assert in_time > 0.99 * step.seconds
    assert found.predict_likely(chosen).seconds <= plan.seconds


def test_units_of_experts_run_beside_each_other():
    """Over a slow network pairs save time, and no more than their bounds allow; they hold a unit more."""
    apart = replace(small().machine, devices_per_node=1)
    found = search(HISTOGRAM, model=MIXTURE, machine=apart, global_batch_size=64)
    plain = candidate(found, 2048, (1, 1, 2, 2), expert_parallel=2)
    paired = replace(plain, setup=replace(plain.setup, hides_experts=True))
    alone, beside = map(found.predict, (plain, paired))
    assert beside.seconds < 0.98 * alone.seconds and beside.memory_gib > alone.memory_gib
    bounds = found.bounds(paired)
    for orders, of_step in zip(found.packed(paired).steps, beside.steps, strict=True):
        compute = max(bounds.by_compute(paired.setup, order) for order in orders)
        in_time = max(bounds.in_time(paired.setup, order) for order in orders)
        assert 0.5 * of_step.seconds < compute <= in_time * (1 + 1e-9) <= of_step.seconds * (1 + 2e-9)


def test_replicas_that_share_experts_have_equally_many_units():
    """Short sequences beside the longest are cut into as many units as it has; average units see that."""
    found = search(HISTOGRAM, model=MIXTURE, global_batch_size=64)
    average = found.average(1024)
    setup = average.setup(ParallelSizes(tensor=1, context=1, pipeline=2, data=2))
    sharing = average.sharing_experts(setup, 2)
    assert sharing.expert_parallel == 2 and sharing.num_microbatches > setup.num_microbatches


def test_where_nothing_fits_the_longest_sequence_is_named():
    found = search(HISTOGRAM, global_batch_size=64, memory_gib=0.5)
    assert found.best(1) == [] and found.megatron_baseline() is None
    sentence = str(found.way_out())
    assert "holds one of 8192 tokens in 0 GiB a device, in units of 1024 tokens or more; take more --gpus" in sentence
    assert "--global-batch-size" not in sentence


def test_units_of_which_a_step_has_too_many_are_not_tried():
    """To find the memory of steps of so many units would take minutes; a smaller batch has them."""
    found = search({10**8 - 1: 1, 10**7: 9}, sequence_length=10**8, global_batch_size=512, memory_gib=1)
    sentence = str(found.way_out())
    assert "in units of 2097152 tokens or more" in sentence and sentence.endswith(", or a smaller --global-batch-size")
    assert found.best(1) == []


def test_packs_of_megatron_hold_the_tokens_of_a_step():
    """Sequences of 100 tokens fill packs of 8,192 but for 92; a batch may be larger than a step, and is then faster."""
    found = search({100: 1}, global_batch_size=162)
    plan = found.megatron_baseline()
    setup = plan.prediction.setup
    assert setup.seen == (pytest.approx(81 * pairs(0, 100, None)),)
    assert plan.tokens_per_second == pytest.approx(8100 * setup.global_batch_size / plan.seconds, rel=0.01)
    assert plan.padding == pytest.approx(92 / 8192)
