"""The planner finds what trying everything would find, and keeps the memory of a device."""

from dataclasses import replace
from functools import partial
from itertools import chain, combinations, pairwise, product
from math import inf
from random import Random
from statistics import median

import pytest
from msgspec import structs

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs import simulator
from megatron.seq1f1b.costs.execution import execute_lowered
from megatron.seq1f1b.costs.machine import GIB
from megatron.seq1f1b.costs.model_shape import DeltaNet, Experts, Mamba
from megatron.seq1f1b.costs.pair_times import BeyondLaunch, ExchangeRow, Exchanges, PairTimes
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.stage_times import balanced_layers, stage_rows
from megatron.seq1f1b.costs.training_setup import (
    ALL_BUT_ATTENTION,
    FULL,
    Fsdp,
    Moves,
    TrainingSetup,
    splits_backward,
)
from megatron.seq1f1b.planner import bounds, memory_bounds, search, search_items, spread_bounds
from megatron.seq1f1b.planner.breakdown import breakdown
from megatron.seq1f1b.planner.first_backward import backwards_like_the_first, units_at_first_backward
from megatron.seq1f1b.planner.fitting import fits, fitted, host_in_flight, layers_leaving
from megatron.seq1f1b.planner.order_table import order_table
from megatron.seq1f1b.planner.rank_ends import rank_ends
from megatron.seq1f1b.planner.search import Search, first_that_fits, predict_candidate
from megatron.seq1f1b.planner.search_order import MOST_OVER, ItemPlace, SearchOrder, WaitingItem
from megatron.seq1f1b.planner.space import (
    Candidate,
    cuts,
    families,
    numbers_of_segments,
    parallel_sizes,
    recomputed,
    setups,
    spread,
)
from megatron.seq1f1b.planner.way_out import way_out
from megatron.seq1f1b.report.plan_figures import Point, frontier
from megatron.seq1f1b.schedule import (
    COMPUTE_KINDS,
    FAMILIES,
    PAIRED,
    PLACEMENTS,
    Action,
    Costs,
    Kind,
    Placement,
    Shape,
    build,
    clock_of,
    lower,
    simulate,
)
from unit_tests.planner.question import MODEL, candidates, linked, small


@pytest.fixture(scope="module")
def everything():
    return [predict_candidate(each, small()) for each in candidates(small())]


@pytest.mark.parametrize("limit", [16, 4, 2.5, 1.7])  # from all that fits to hardly anything
def test_the_best_of_everything_that_fits(everything, limit):
    best_cuts = {}
    for each in sorted(everything, key=lambda each: each.candidate.strategy):  # balanced first
        setup, count = each.candidate.setup, len(each.candidate.setup.segments)
        if each.memory_gib <= limit:
            best_cuts.setdefault(replace(setup, segments=(count,), sequence_length=count), each)
    fitting = best_cuts.values()
    expected = sorted(each.prediction.seconds for each in fitting)[:5]
    found = Search(small(memory_gib=limit)).best()
    assert [each.prediction.seconds for each in found] == pytest.approx(expected, rel=1e-12)
    assert all(each.memory_gib <= limit for each in found)
    assert 0 < len(fitting) < len(everything)


def test_what_does_not_fit_moves_to_the_host_if_that_is_fastest():
    question = linked(1e12, memory_gib=1.45, host_gib=2, recomputes=("none",))
    by_1f1b = [each for each in candidates(question) if each.setup.family == "1f1b"]
    by_layer = [
        replace(each, setup=replace(each.setup, layers_leaving=most))
        for each in by_1f1b
        for most in layers_leaving(each.setup, question.machine)
    ]
    found = ((each, fitted(each.setup, question.budget, Moves.UNITS)) for each in by_1f1b + by_layer)
    moved = [replace(each, setup=setup) for each, setup in found if setup is not None and setup.offloads]
    moving = [predict_candidate(each, question) for each in moved]
    (best,) = Search(question).best(1)
    assert best.candidate.setup.offloads and 0 < best.host_gib <= 2 and best.memory_gib <= 1.45
    balanced = [each for each in moving if len(each.candidate.setup.segments) == 1 or each.candidate.strategy != "even"]
    assert best.prediction.seconds <= min(each.prediction.seconds for each in balanced if each.host_gib <= 2)
    assert best in moving
    for each in moving:
        setup, seconds = each.candidate.setup, each.prediction.seconds * (1 + 1e-9)
        for by_layer in (True, False):
            least = memory_bounds.least_seconds_away(setup, question.budget, len(setup.segments), by_layer)
            assert least <= seconds
        for rank in range(setup.pipeline_parallel):
            assert 0 < bounds.least_seconds_copying(setup, question.machine, rank) <= seconds
    # A full host, a slow link or enough memory: nothing moves.
    assert Search(small(host_gib=100)).best() == Search(small()).best()
    for other in (replace(question, host_gib=0.01), linked(1e6, memory_gib=1.45, host_gib=2, recomputes=("none",))):
        assert Search(other).best(1) == Search(replace(other, host_gib=0)).best(1)


def test_more_moves_where_a_rank_would_hold_too_much():
    """The share that is enough for a few micro-batches, on the ranks that may be fullest, may not be for the step."""
    setup = TrainingSetup(replace(preset("7b"), num_layers=16), 32768, 32, placement=Placement(4, 2))
    question = linked(1e12, memory_gib=67.5, host_gib=1000)
    predicted = partial(predict_candidate, question=question)
    least = Candidate(fitted(setup, question.budget, Moves.UNITS))
    assert 0 < least.setup.offloads < 1 and predicted(least).memory_gib > 67.5
    found = first_that_fits(least, question.budget, predicted)
    share = found.candidate.setup.offloads
    assert found.fits(question.budget) and least.setup.offloads < share
    assert not predicted(Candidate(least.setup.but(offloads=share - 1 / 16))).fits(question.budget)
    assert first_that_fits(least, linked(1e12, memory_gib=67.5, host_gib=10).budget, predicted) is None


def test_bounds_are_bounds(everything):
    for each in everything:
        setup = each.candidate.setup
        assert bounds.least_seconds(setup, small().machine) <= each.prediction.seconds * (1 + 1e-9)
        assert bounds.least_seconds_in_time(setup, small().machine) <= each.prediction.seconds * (1 + 1e-9)
        segments = len(setup.segments)
        fullest = each.memory_gib * 2**30 * (1 + 1e-9)
        assert memory_bounds.least_bytes(setup, segments) <= fullest
        excess = memory_bounds.excess_of_others(setup, segments, fullest)
        assert max([memory_bounds.excess_of_first(setup, segments, fullest), *excess.values()]) <= 0
    for sizes in parallel_sizes(small()):
        for each, (family, segments) in product(recomputed(small(), sizes), product(small().families, (1, 2, 4))):
            splits = splits_backward(family)
            least = spread_bounds.least_seconds_of(each, small().machine, segments, splits)
            assert spread_bounds.least_seconds_of_any(sizes, small(), segments) <= least
            for setup in spread(small(), each):
                if family in families(small(), setup):
                    fastest = each.without_recomputation()
                    of_chunks = spread_bounds.least_seconds_in_chunks(
                        fastest, small().machine, segments, splits, {setup.layers_per_stage}
                    )
                    closer = bounds.least_seconds_cut(replace(setup, family=family), small().machine, segments)
                    for found in cuts(replace(setup, family=family), segments):
                        exact = bounds.least_seconds(found.setup, small().machine)
                        assert max(least, of_chunks, closer) <= exact * (1 + 1e-9)


def test_no_layer_is_better_on_another_rank():
    """Embedding and loss take from nothing to as long as many layers. A host that launches at once adds nothing."""
    draw = Random(0)
    machine = small().machine
    at_once = structs.replace(machine.host, action=0.0, layer_forward=0.0, layer_backward=0.0)
    machine = replace(machine, host=at_once)
    for _ in range(200):
        placement = Placement(draw.randint(2, 6), draw.randint(1, 4))
        model = replace(
            MODEL,
            num_layers=placement.num_stages + draw.randint(0, 40),
            vocab_size=draw.choice((256, 32_000, 500_000, 4_000_000)),
        )
        setup = TrainingSetup(model, 4096, 8, placement=placement)
        layers = balanced_layers(setup, placement, machine)
        seconds = [sum(map(sum, row)) for row in stage_rows(setup.but(layers_per_stage=layers), machine)]
        in_three = TrainingSetup(replace(model, num_layers=3), 4096, 8, placement=Placement(3))
        of_layer = sum(map(sum, stage_rows(in_three, machine)[1]))
        stages_of_ranks = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
        of_ranks = [sum(seconds[stage] for stage in stages) for stages in stages_of_ranks]
        for stages, of_rank in zip(stages_of_ranks, of_ranks, strict=True):
            if sum(layers[stage] for stage in stages) > placement.num_chunks:
                assert of_rank - of_layer <= min(of_ranks) * (1 + 1e-9)


def test_uneven_cuts_are_expected_to_take_longer():
    """Beyond the limit alone, and never more than an order may be off."""
    setup = TrainingSetup(MODEL, 65536, 4, placement=Placement(4), segments=(16384,) * 4)
    (even,) = cuts(setup.but(segments=()), 1)
    in_segments = {found.strategy: found.setup for found in cuts(setup, 4)}
    uneven = {name: bounds.unevenness_of_segments(cut, small().machine) for name, cut in in_segments.items()}
    assert bounds.unevenness_of_segments(even.setup, small().machine) == 1
    assert 1 <= uneven["balanced"] < 1.1 < 1.3 < uneven["even"]

    def seconds(unevenness, limit):
        item = search_items.AlikeCuts((setup,), (), unevenness)
        return SearchOrder(limit).placed(WaitingItem(ItemPlace(8.0, -1, (0,)), 8.0, True, item)).place.seconds

    assert seconds(1.3, limit=9.0) == 8
    assert 8 < seconds(1.0, limit=7.0) < seconds(1.1, limit=7.0) < seconds(9.0, limit=7.0) == 8 * MOST_OVER


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_the_bound_of_a_long_step_follows_from_short_ones(family, monkeypatch):
    """All ranks have four layers, but in stages of one and three, so that they wait for each other."""
    monkeypatch.setattr(simulator, "_MOST_ACTIONS", 0)
    machine = small(host_gib=100).machine
    setup = TrainingSetup(
        replace(MODEL, num_layers=16, vocab_size=1024),
        8192,
        64,
        family=family,
        placement=Placement(4, 2),
        layers_per_stage=(3, 1, 3, 1, 1, 3, 1, 3),
        segments=(4096, 4096),
    )
    offloads = (0.0, 0.5, 1.0) if family == "1f1b" else (0.0,)
    for share in offloads:
        moving = replace(setup, offloads=share)
        assert simulator.is_extended(moving.shape)
        by_order = bounds.least_seconds_in_time(moving, machine)
        assert 1.1 * bounds.least_seconds(moving, machine) < by_order <= predict(moving, machine).seconds


@pytest.mark.parametrize("launching", [2, 5, 10, 20, 40])
def test_bounds_of_any_cut_where_launches_count(launching):
    """Times as many launches: in an even cut some segments wait for the host and others do not; a balanced cut may have
    neither."""
    machine = small().machine
    host = structs.replace(
        machine.host,
        layer_forward=launching * machine.host.layer_forward,
        layer_backward=launching * machine.host.layer_backward,
    )
    question = small(
        machine=replace(machine, host=host), sequence_length=32768, segments=(4, 8, 16), micro_batches=(1,)
    )
    for sizes in parallel_sizes(question):
        for setup, segments in product(spread(question, sizes), (4, 8, 16)):
            least = spread_bounds.least_seconds_of(sizes, question.machine, segments, splits=False)
            closer = bounds.least_seconds_cut(setup, question.machine, segments)
            for found in cuts(setup, segments):
                exact = bounds.least_seconds(found.setup, question.machine)
                assert max(least, closer) <= exact * (1 + 1e-9)


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "breadth-first"])
def test_without_messages_a_rank_takes_no_longer(family):
    """Random set-ups with random shares on the host, experts in pairs and without, over a slow link and over
    a fast one. Where the link is slow the bound is far closer than that of the compute alone. Nor does a pipeline take
    longer without moves, and the fullest rank moves no more than a step does."""
    machines = {bandwidth: linked(bandwidth).machine for bandwidth in (2e9, 2e10, 1e12)}
    draw = Random(family)
    shares = []
    for _ in range(30):
        question = draw.choice((small(), mixture()))
        sizes = draw.choice([each for each in parallel_sizes(question) if each.pipeline_parallel > 1])
        segments = draw.choice(numbers_of_segments(question, sizes))
        found = draw.choice([*spread(question, draw.choice([*recomputed(question, sizes, segments)]))])
        setup = draw.choice([*cuts(replace(found, family=family), segments)]).setup
        moving = replace(setup, offloads=draw.randint(1, 16) / 16, hides_experts=setup.has_pairs)
        bandwidth = draw.choice([*machines])
        predicted = predict(moving, machines[bandwidth])
        seconds = predicted.seconds
        ranks = range(moving.pipeline_parallel)
        of_ranks = [bounds.least_seconds_copying(moving, machines[bandwidth], rank) for rank in ranks]
        least = max(of_ranks)
        assert 0 < min(of_ranks) <= least <= seconds * (1 + 1e-9)
        assert bounds.least_seconds(moving, machines[bandwidth]) <= seconds * (1 + 1e-9)
        assert 0 < bounds.least_seconds_in_time(moving, machines[bandwidth]) <= seconds * (1 + 1e-9)
        assert host_in_flight(moving) <= max(predicted.host_bytes) * (1 + 1e-9)
        staying = predict(replace(moving, offloads=0.0), machines[bandwidth])
        fullest = max(memory.total for memory in staying.memory)
        assert 0 < memory_bounds.least_bytes(moving, len(moving.segments)) <= fullest * (1 + 1e-9)
        of_sizes = spread_bounds.least_seconds_of(
            moving, machines[bandwidth], len(moving.segments), moving.splits_backward
        )
        spreads = {moving.layers_per_stage}
        in_chunks = spread_bounds.least_seconds_in_chunks(
            moving, machines[bandwidth], segments, moving.splits_backward, spreads
        )
        assert 0 < max(of_sizes, in_chunks) <= staying.seconds * (1 + 1e-9)
        shares += [least / seconds] if bandwidth == 2e9 else []
    assert median(shares) > 0.9


def test_a_device_has_no_less_whatever_moves():
    """Units move as a whole or layer by layer, any share of them. Later ranks have experts, which the first one has
    not. Where all units move the bound is close for some."""
    model = replace(mixture().model, num_layers=11, expert_layers=tuple(range(3, 11)))
    question = mixture(model=model, sequence_length=36864, num_devices=8)
    draw = Random(0)
    of_units = []
    of_layers = []
    while min(len(of_units), len(of_layers)) < 20:
        sizes = draw.choice([each for each in parallel_sizes(question) if each.pipeline_parallel > 1])
        segments = draw.choice(numbers_of_segments(question, sizes))
        found = draw.choice([*spread(question, draw.choice([*recomputed(question, sizes, segments)]))])
        setup = draw.choice([*cuts(replace(found, family="1f1b"), segments)]).setup
        moving = setup.but(offloads=draw.choice((4, 8, 16)) / 16, hides_experts=setup.has_pairs)
        by_layer = draw.random() < 0.5 and not moving.has_pairs
        if by_layer:
            moving = moving.but(layers_leaving=draw.choice((2, 4)))
        fullest = max(memory.total for memory in predict(moving, question.machine).memory)
        least = memory_bounds.least_on_device(setup, segments, by_layer)
        assert 0 < least <= fullest * (1 + 1e-9)
        (of_layers if by_layer else of_units).append(least / fullest)
    assert max(of_units) > 0.8 and max(of_layers) > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_end_as_in_the_simulation(family):
    """Random shapes and times; pairs also as the prediction runs them, where messages take no time."""
    draw = Random(family)
    for _ in range(40):
        placement = Placement(draw.randint(1, 4), draw.randint(1, 3), draw.choice(PLACEMENTS))
        shape = Shape(placement, draw.randint(1, 5), draw.randint(1, 4))
        has_pairs = family in PAIRED and draw.random() < 0.5
        schedule = build(family, shape, pairs=has_pairs)
        f, i, w, message_f, message_b = (
            tuple(tuple(draw.random() for _ in range(shape.num_segments)) for _ in range(shape.num_stages))
            for _ in range(5)
        )
        nothing = ((0.0,) * shape.num_segments,) * shape.num_stages
        costs = Costs(f, i, w, message_f, message_b, activation=nothing, activation_for_w=nothing)
        assert rank_ends(family, shape, has_pairs).by(costs) == pytest.approx(ends_of(simulate(schedule, costs)))
        if has_pairs:
            tenths = [tuple(seconds / 10 for seconds in row) for row in f]
            exchanges = Exchanges([ExchangeRow(row, row, row, row) for row in tenths])
            hidden = PairTimes(exchanges, [BeyondLaunch(row, row) for row in tenths])
            costs = replace(costs, message_f=nothing, message_b=nothing)
            executed = execute_lowered(lower(schedule), costs, pairs=hidden)
            assert rank_ends(family, shape, has_pairs).by(costs, hidden) == pytest.approx(ends_of(executed))


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_these_units(family):
    """Random shapes, with pairs and without: each rank at its first backward, and the first one as many others at later
    ones of 1F1B."""
    draw = Random(family)
    repeated = 0
    for _ in range(60):
        shape = Shape(Placement(draw.randint(1, 6), draw.randint(1, 4)), draw.randint(1, 24), draw.choice((1, 2, 3, 8)))
        has_pairs = family in PAIRED and draw.random() < 0.5
        clock = clock_of(family, shape, has_pairs)
        for rank in range(shape.num_ranks):
            at_first = held_during_backwards(clock, rank)[0]
            of_stages = tuple(sum(unit[0] == stage for unit in at_first) for stage in shape.placement.stages_of(rank))
            assert units_at_first_backward(family, shape, has_pairs, rank) == of_stages
        held = held_during_backwards(clock, rank=0)
        by_chunk = units_at_first_backward(family, shape, has_pairs)
        stages = shape.placement.stages_of(0)
        if family == "1f1b":
            alike = [held[number] for number in backwards_like_the_first(shape, has_pairs)]
            for units in alike:
                assert by_chunk == tuple(sum(unit[0] == stage for unit in units) for stage in stages)
            assert all(units.isdisjoint(others) for units, others in combinations(alike, 2))
            repeated += len(alike) > 1
    assert repeated > 10 or family != "1f1b"


def held_during_backwards(clock, rank):
    """The units that a rank holds during each backward, without that of a forward beside it."""
    order = clock.order(rank)
    paired = clock.pairs_in(order)
    held = set()
    during = []
    for number, action in enumerate(order):
        if action.kind is Kind.F:
            held.add(action.unit)
        elif action.kind.facts.gives_input_gradient:
            beside = {order[number - 1].unit} if order[number - 1] in paired else set()
            during.append(frozenset(held - beside))
            held.remove(action.unit)
    return during


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_has_the_orders_of_a_clock(family):
    """Random shapes, with equal and unequal numbers of segments, and with pairs."""
    draw = Random(family)
    for _ in range(40):
        placement = Placement(draw.randint(1, 5), draw.randint(1, 3), draw.choice(PLACEMENTS))
        shape = Shape.of(placement, [draw.randint(1, 4) for _ in range(draw.randint(1, 5))])
        clock = clock_of(family, shape, has_pairs=family in PAIRED and draw.random() < 0.5)
        table = order_table(clock)
        schedule = clock.schedule()
        for rank, order in enumerate(schedule.ranks):
            of_rank = [column[rank].tolist() for column in (table.kind, table.stage, table.unit)]
            actions = [
                Action(COMPUTE_KINDS[kind], stage, *shape.units[unit])
                for kind, stage, unit in zip(*of_rank, strict=True)
            ]
            assert actions == list(order)
            assert table.tick[rank].tolist() == clock.ticks(order)
            if clock.has_pairs:
                opens = zip(actions, table.opens_pair()[rank], strict=True)
                assert {action for action, is_open in opens if is_open} == schedule.pairs_in(order)


def ends_of(timeline):
    return [spans[-1].end for spans in timeline.ranks]


def mixture(**changes):
    """A small question with experts, and with lengths that tiles and segments do not divide."""
    layers = tuple(range(MODEL.num_layers))
    experts = replace(MODEL, num_kv_heads=2, experts=Experts(4, 2, 1024), expert_layers=layers)
    sizes = {
        "sequence_length": 9216,
        "segments": (1, 2, 4, 8),
        "chunks": (1, 3),
        "recomputes": ("none", "layernorm moe"),
    }
    return small(**{"model": experts, **sizes, **changes})


@pytest.mark.parametrize("changes", [{}, {"sequence_length": 10240, "num_devices": 6, "global_batch_size": 6}])
def test_more_segments_have_no_lower_bound(changes):
    """So that a search looks at more segments only if fewer were fast enough. Whole sequences are apart."""
    for question in (mixture(**changes), small(**changes)):
        for sizes in parallel_sizes(question):
            several = [each for each in numbers_of_segments(question, sizes) if each > 1]
            least = [spread_bounds.least_seconds_of_any(sizes, question, each) for each in several]
            assert least == sorted(least)


def test_the_exchange_of_experts_is_hidden_or_shown():
    """Under families with pairs, of whole sequences and of segments; with experts recomputed, too, but for Megatron's
    plans; where a unit has another to run beside."""
    question = mixture(recomputes=("none", "layernorm moe", FULL, ALL_BUT_ATTENTION))
    shared = [each for each in parallel_sizes(question) if each.expert_parallel > 1]
    assert shared
    for sizes in shared:
        for segments in (1, 2):
            found = [*recomputed(question, sizes, segments)]
            hiding = [each for each in found if each.hides_experts]
            is_alone = sizes.num_microbatches * segments == 1
            assert {each.recompute for each in hiding} == (set() if is_alone else {"none", "layernorm moe"})
            assert {each.recompute for each in found if not each.hides_experts} == {*question.recomputes}
            assert {*chain.from_iterable(families(question, each) for each in hiding)} <= {*PAIRED}
        of_megatron = [*recomputed(question.megatron_baseline(), sizes)]
        assert not any(each.repeats("E") for each in of_megatron if each.hides_experts)
    least = min(shared, key=lambda each: each.pipeline_parallel)
    setup = replace(least, segments=(4608, 4608), num_microbatches=4, family="1f1b", hides_experts=True)
    predicted = predict_candidate(Candidate(setup), question).prediction
    assert bounds.least_seconds(setup, question.machine) <= predicted.seconds
    assert predicted.seconds < predict_candidate(Candidate(replace(setup, hides_experts=False)), question).seconds


def deep_mixture(**changes):
    """A question whose state may be partitioned, and of some sizes has to be."""
    model = replace(mixture().model, num_layers=24, expert_layers=tuple(range(24)), vocab_size=1024)
    sizes = {"num_devices": 8, "global_batch_size": 16, "sequence_length": 2048, "micro_batches": (1,)}
    choices = {"families": ("1f1b", "breadth-first"), "chunks": (1, 3, 6, 12), "segments": (1, 4)}
    recomputes = ("none", FULL)
    return small(model=model, recomputes=recomputes, partitions_state=None, **sizes, **choices, **changes)


QUESTIONS = {
    "ours": mixture(memory_gib=1.9),
    "megatron": mixture(memory_gib=3).megatron_baseline(),
    "partitioned": deep_mixture(memory_gib=1),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_what_the_bounds_leave_out_is_no_answer(monkeypatch, question):
    """The search with all bounds, and without any."""
    pruned = Search(question)
    found = pruned.best(3)
    for name in (
        "least_seconds",
        "least_seconds_away",
        "least_seconds_copying",
        "least_seconds_cut",
        "least_seconds_in_chunks",
        "least_seconds_in_time",
        "least_seconds_moving_modules",
        "least_seconds_moving_modules_in_time",
        "least_seconds_of",
        "least_seconds_of_any",
    ):
        monkeypatch.setattr(search, name, lambda *sizes: 0.0)
    monkeypatch.setattr(search.SizesMemory, "may_fit", lambda memory, setup, splits: True)
    monkeypatch.setattr(search, "with_room_for_state", lambda question, sizes: sizes)
    exhaustive = Search(question)
    assert [each.seconds for each in exhaustive.best(3)] == [each.seconds for each in found]
    assert len(pruned.plans) < len(exhaustive.plans)


def test_steps_beyond_a_limit_need_not_be_the_fastest(monkeypatch):
    """Plans that beat the limit are the exact ones. Others are found with less work, as close as is said."""
    question = mixture(memory_gib=1.9)
    exact = Search(question)
    found = exact.best(3)
    monkeypatch.setattr(search, "_ALONE", 10)
    assert Search(question).best(3) == found
    assert Search(question).best(1, exact_below=1.001 * found[0].seconds) == found[:1]
    for limit in (0.0, 0.9 * found[0].seconds):
        looked_at = []
        rough = Search(question, progress=looked_at.append)
        near = rough.best(3, exact_below=limit)
        assert limit < found[0].seconds <= near[0].seconds <= MOST_OVER * found[0].seconds
        assert near == sorted(near, key=lambda plan: plan.seconds)
        assert near[0] == found[0] or limit <= rough.least_seconds <= found[0].seconds
        assert len(rough.plans) <= len(exact.plans)
    to_the_end = Search(question)
    monkeypatch.setattr(search, "_AFTER_FIRST", inf)
    assert to_the_end.best(10**6, exact_below=0.0)[0] == found[0]
    assert to_the_end.least_seconds == inf


def test_plans_that_take_much_longer_are_not_looked_for():
    everything = Search(small())
    seconds = [plan.seconds for plan in everything.best(100)]
    near = Search(small())
    assert [plan.seconds for plan in near.best(100, within=1.05)] == [
        each for each in seconds if each < 1.05 * seconds[0]
    ]
    assert 1 < len(near.plans) < len(everything.plans)


def test_an_early_end_takes_what_was_predicted(monkeypatch):
    """It looks at no more items once it has a plan, and takes others that fit and were predicted, fastest first."""
    question = mixture(memory_gib=1.9)
    monkeypatch.setattr(search, "_ALONE", 10)
    monkeypatch.setattr(search, "_AFTER_FIRST", inf)
    items_of_all = []
    Search(question, progress=items_of_all.append).best(100, exact_below=0.0)
    monkeypatch.setattr(search, "_AFTER_FIRST", 20)
    items_of_few = []
    few = Search(question, progress=items_of_few.append)
    found = few.best(100, exact_below=0.0)
    assert len(items_of_few) < len(items_of_all)
    fitting = [plan.seconds for plan in few.plans.values() if plan.fits(question.budget)]
    assert [plan.seconds for plan in found] == sorted(fitting)
    assert 1 < len(found) < 100


def test_megatron_replays_layers_where_its_host_is_slow():
    """Not beside FSDP, and not with whole layers or experts computed again. Segments have no graphs."""
    for seconds, is_slow in ((1e-6, False), (0.2, True)):
        question = mixture(recomputes=("none", "layernorm moe", FULL), memory_gib=8)
        host = structs.replace(question.machine.host, layer_forward=seconds, layer_backward=2 * seconds)
        question = replace(question, machine=replace(question.machine, host=host))
        assert not any(plan.candidate.setup.replays_layers for plan in Search(question).best())
        question = question.megatron_baseline()
        found = [*chain.from_iterable(recomputed(question, sizes) for sizes in parallel_sizes(question))]
        assert {setup.fsdp for setup in found} > {Fsdp.OFF}
        assert {setup.recompute for setup in found} == {*question.recomputes}
        for setup in found:
            may = setup.fsdp is Fsdp.OFF and setup.recompute == "none"
            assert setup.replays_layers == (is_slow and may)
        (best,) = Search(question).best(1)
        launched = best.candidate.setup.but(replays_layers=False)
        assert best.candidate.setup.replays_layers == is_slow
        assert (best.seconds < predict(launched, question.machine).seconds) == is_slow


def test_the_state_is_partitioned_where_that_is_faster():
    """A deep model, where weights and gradients fill a device, and where they do not."""
    changes = {"model": replace(MODEL, num_layers=24, vocab_size=1024), "num_devices": 8, "global_batch_size": 16}
    changes |= {"sequence_length": 2048, "families": ("1f1b", "breadth-first"), "chunks": (1, 6), "segments": (1, 4)}
    little, enough = (small(**changes, memory_gib=limit) for limit in (1.5, 2))
    (best,), (whole,) = (Search(replace(little, partitions_state=each)).best(1) for each in (None, False))
    assert best.candidate.setup.partitions_state and best.memory_gib <= 1.5
    assert best.prediction.seconds < whole.prediction.seconds
    assert Search(replace(enough, partitions_state=None)).best() == Search(enough).best()


def test_a_state_that_fits_as_shares_alone_is_partitioned():
    question = deep_mixture(memory_gib=1)
    ways = set()
    for sizes in parallel_sizes(question):
        found = memory_bounds.with_room_for_state(question, sizes)
        ways.add(found.partitions_state if found else None)
        if found and found.partitions_state:
            for segments in (1, 4):
                for each in chain.from_iterable(spread(question, one) for one in recomputed(question, found, segments)):
                    assert families(question, each) == ["breadth-first"] and not each.hides_experts
                    assert each.placement.num_chunks >= 3
    assert ways == {False, True, None}
    assert Search(question).best(1)[0].candidate.setup.partitions_state


def test_a_partitioned_state_has_whole_chunks_beside_it():
    """The bound is close where weights fill a device, since a rank then holds whole chunks at a backward."""
    shares = []
    model = replace(MODEL, num_layers=24, vocab_size=1024)
    for chunks, segments, data, microbatches in product((3, 6), (1, 4), (2, 4), (2, 3)):
        whole = TrainingSetup(
            model,
            2048,
            microbatches,
            data_parallel=data,
            placement=Placement(2, chunks),
            family="breadth-first",
            distributed_optimizer=True,
            partitions_state=True,
        )
        for found in cuts(whole, segments):
            exact = predict(found.setup, small().machine)
            fullest = max(memory.total for memory in exact.memory)
            least = memory_bounds.least_bytes(found.setup, segments)
            assert least <= fullest * (1 + 1e-9)
            shares.append(least / fullest)
            # Memory that is enough for the whole set-up is enough for its state.
            choices = {"families": ("breadth-first",), "chunks": (chunks,), "partitions_state": None}
            question = small(model=model, memory_gib=fullest / GIB, **choices)
            sizes = whole.but(partitions_state=False, placement=Placement(2), layers_per_stage=())
            assert memory_bounds.with_room_for_state(question, sizes)
    assert min(shares) > 0.8


def test_the_busiest_rank_has_whole_layers():
    """Seven layers are not spread evenly over four ranks, one of which also has a large loss."""
    question = small(model=replace(MODEL, num_layers=7, vocab_size=1 << 17), segments=(1,), chunks=(1,))
    (sizes,) = (each for each in parallel_sizes(question) if each.pipeline_parallel == 4 and each.micro_batch_size == 1)
    least = spread_bounds.least_seconds_of(sizes, question.machine, 1, splits=False)
    (setup,) = spread(question, sizes)
    exact = predict(setup, question.machine).seconds
    assert 0.9 * exact < least <= exact


def test_winners_with_too_many_actions_for_auto_are_named(monkeypatch):
    def of_four():
        return Search(small(families=("zb-h1", "auto"), accepts=lambda each: each.setup.pipeline_parallel == 4))

    monkeypatch.setattr(search, "MOST_ACTIONS_OF_AUTO", 0)
    without = of_four()
    found = without.best(3)
    assert {each.candidate.setup.family for each in found} == {"zb-h1"}
    assert {each.candidate.setup.pipeline_parallel for each in found} == {4}
    automatic = [replace(each.candidate, setup=replace(each.candidate.setup, family="auto")) for each in found]
    assert without.too_long_for_auto == {*automatic}

    # What is left after the fastest is too little for the others.
    of_fastest = 3 * automatic[0].setup.shape.num_units * automatic[0].setup.placement.num_stages
    monkeypatch.setattr(search, "MOST_ACTIONS_OF_AUTO", of_fastest)
    with_fastest = of_four()
    with_fastest.best(3)
    assert automatic[0] in with_fastest.plans
    assert with_fastest.too_long_for_auto == {*automatic[1:]}


def test_a_breakdown_adds_up(everything):
    for each in everything[::7]:
        parts = breakdown(each.prediction)
        assert sum(parts.values()) == pytest.approx(each.prediction.seconds)
        assert min(parts.values()) >= -1e-9


def test_what_cannot_be_divided_is_a_sentence_with_a_way_out():
    question = small(num_devices=7, global_batch_size=4)
    assert Search(question).best() == []
    sentence = str(way_out(question))
    assert "7 devices" in sentence and "; --global-batch-size 7 can be divided" in sentence
    assert Search(small(num_devices=7, global_batch_size=7)).best()
    assert "no configuration fits 0 GiB" in str(way_out(small(memory_gib=0)))


def test_megatron_moves_whole_layers_without_a_pipeline():
    """And without recomputation, as few as fit: with a fast link that is no slower than its modules."""
    question = linked(1e12, num_devices=1, memory_gib=6, host_gib=8, micro_batches=(1,)).megatron_baseline()
    found = Search(question).best(20)
    moving = [each for each in found if each.candidate.setup.moves is Moves.LAYERS]
    assert moving and moving[0].seconds == found[0].seconds
    assert not any(each.candidate.setup.replays_layers for each in moving)
    for plan in moving:
        setup = plan.candidate.setup
        assert (setup.pipeline_parallel, setup.recompute) == (1, "none") and 0 < setup.offloads < 1
        fewer = replace(setup, offloads=setup.offloads - 1 / setup.model.num_layers)
        assert not fits(fewer, question.budget.device)
    (slow,) = Search(linked(1e9, num_devices=1, memory_gib=6, host_gib=8, micro_batches=(1,)).megatron_baseline()).best(
        1
    )
    assert slow.candidate.setup.moves is not Moves.LAYERS


def test_megatron_moves_nothing_beside_whole_recomputed_layers():
    question = linked(1e12, memory_gib=2.2, host_gib=8, recomputes=(FULL,)).megatron_baseline()
    plans = Search(question).best(100)
    assert {plan.candidate.setup.recomputed_share < 1 for plan in plans} == {False, True}
    assert not any(plan.candidate.setup.offloads for plan in plans)


@pytest.mark.parametrize(
    "changes", [{"memory_gib": 0.9}, {"num_devices": 1, "memory_gib": 2.0, "host_gib": 0.1}], ids=["device", "host"]
)
def test_what_does_not_fit_names_the_nearest_that_does(changes):
    question = linked(1e12, **changes)
    assert Search(question).best() == []
    sentence = str(way_out(question))
    assert "no configuration fits" in sentence
    named = {"--gpus": "num_devices", "--seq-length": "sequence_length"}
    words = sentence.replace(",", " ").split()
    found = [{named[flag]: int(value)} for flag, value in pairwise(words) if flag in named]
    assert found
    assert all(Search(replace(question, **change)).best() for change in found)


def test_a_frontier_is_what_nothing_beats():
    points = [Point(2, 5, "a"), Point(1, 3, "b"), Point(3, 4, "c"), Point(2, 4, "d"), Point(4, 6, "e")]
    assert [each.name for each in frontier(points)] == ["b", "a", "e"]


def test_recurrent_heads_are_shared_equally():
    """As Megatron asserts when it builds such layers; it hides the exchange of experts in no hybrid model."""
    recurrent = DeltaNet(key_heads=2, value_heads=4, key_head_dim=64, value_head_dim=64)
    model = replace(small().model, pattern="GE" * 3, delta_net=recurrent, experts=Experts(8, 2, 512))
    question = small(model=model, num_devices=8).megatron_baseline()
    found = list(setups(question))
    assert {each.tensor_parallel * each.context_parallel for each in found} == {1, 2}
    assert not any(each.hides_experts for each in found)
    assert not Mamba(heads=8, head_dim=64, groups=3, state_dim=16).shared_by(2, 1)


def sizes(setup) -> tuple[int, int, int, int]:
    return setup.tensor_parallel, setup.context_parallel, setup.pipeline_parallel, setup.data_parallel


@pytest.mark.parametrize(
    "changes, holds",
    [
        ({"num_devices": 1}, lambda setup: sizes(setup) == (1, 1, 1, 1)),
        ({"sequence_length": 4099}, lambda setup: sizes(setup)[:2] == (1, 1) and sum(setup.segments) == 4099),
        ({"sequence_length": 2}, lambda setup: len(setup.segments) <= 2),
        ({"global_batch_size": 1}, lambda setup: setup.data_parallel == setup.num_microbatches == 1),
        ({"num_devices": 6, "global_batch_size": 3}, lambda setup: setup.data_parallel in (1, 3)),
        ({"model": replace(MODEL, num_layers=1)}, lambda setup: setup.pipeline_parallel == 1),
        ({"model": replace(MODEL, num_heads=7)}, lambda setup: setup.tensor_parallel == 1),
    ],
    ids=["one device", "a length that nothing divides", "few tokens", "one sequence", "few divisors", "layer", "heads"],
)
def test_an_unusual_question_has_a_sensible_answer(changes, holds):
    found = Search(small(**changes)).best(20)
    assert found and all(holds(each.candidate.setup) and each.prediction.bubble >= 0 for each in found)


def test_one_pipeline_rank_runs_segments_where_these_save_memory():
    """Recomputation of a wide layer is that of a segment, and few heads have keys and values to keep."""
    model = replace(MODEL, num_kv_heads=1, ffn_hidden_size=8192)
    alone = small(model=model, num_devices=1, sequence_length=131072, recomputes=("full",), memory_gib=70)
    whole, cut = (Search(replace(alone, segments=segments)).best(1)[0] for segments in ((1,), (8,)))
    assert len(cut.candidate.setup.segments) == 8 and cut.memory_gib < whole.memory_gib


def test_auto_is_shown_where_it_is_faster_and_only_there():
    question = small(families=("1f1b", "auto"), memory_gib=3, chunks=(1,))
    found = Search(replace(question, accepts=lambda each: each.setup.pipeline_parallel > 1)).best(12)
    named = {each.candidate.setup: each.seconds for each in found}
    automatic = [each for each in found if each.candidate.setup.family == "auto"]
    same = [named.get(replace(each.candidate.setup, family="1f1b"), 1.0) for each in automatic]
    assert automatic and all(each.seconds < seconds for each, seconds in zip(automatic, same, strict=True))
