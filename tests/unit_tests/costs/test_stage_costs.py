"""FLOPs of a segment by kind of layer, its cost on a stage, by formulas and from a trace, and cuts and plans by it."""

from dataclasses import replace
from itertools import accumulate, pairwise
from unittest.mock import Mock

import pytest
from msgspec import structs

from megatron.seq1f1b.costs.blocks import layer_flops
from megatron.seq1f1b.costs.machine import Device
from megatron.seq1f1b.costs.model_shape import DeltaNet, Experts, LatentAttention, Mamba, ModelShape
from megatron.seq1f1b.costs.stage_costs import (
    A100,
    CPU_CORE,
    AnalyticTime,
    TimedSegment,
    action_costs,
    analytic_costs,
    bottleneck_time,
    fit_time,
    read_traced_costs,
    setup_costs,
    setup_pace,
    traced_costs,
)
from megatron.seq1f1b.costs.training_setup import ALL_BUT_ATTENTION, FULL, TrainingSetup
from megatron.seq1f1b.files.timeline_file import write_timeline
from megatron.seq1f1b.partition import balanced
from megatron.seq1f1b.runtime.rank_schedule import RankSchedules
from megatron.seq1f1b.schedule import Kind, Placement, ScheduleChoice, Shape, build, lower_rank
from megatron.seq1f1b.schedule.timeline import Timeline
from megatron.seq1f1b.schedule.timing import simulate

GPT_7B = ModelShape(32, 4096, 16384, 32, 128, 32768)
# Seconds are FLOPs, and elements of the embedding.
COUNT = Device("count", 1, 1, 2, 1, 1, 1, 1, 1, 0)


@pytest.mark.parametrize("recompute", ["none", "layernorm mlp", ALL_BUT_ATTENTION, FULL])
def test_the_pace_of_a_set_up_is_that_of_its_costs(recompute):
    """Modules that are computed again count as nothing; layers do not."""
    setup = TrainingSetup(GPT_7B, 32768, 4, placement=Placement(4), recompute=recompute)
    pace = setup_pace(setup)
    assert pace == bottleneck_time(setup_costs(setup))
    assert (pace == setup_pace(replace(setup, recompute="none"))) == (recompute in ("none", "layernorm mlp"))


def test_flops_of_experts_are_those_of_a_token():
    """Two of sixteen, a router and a shared one, in the second layer only."""
    model = replace(GPT_7B, experts=Experts(16, 2, 1024, 2048), expert_layers=(1,))
    assert layer_flops(model, 0) == layer_flops(GPT_7B, 0) == (24 * 4096**2, 4 * 4096)
    assert layer_flops(model, 1)[0] == 8 * 4096**2 + 4 * 4096 * (2 * 1024 + 2048) + 2 * 4096 * 16


def test_latent_attention_counts_its_low_rank_projections():
    # DeepSeek-V2: 128 heads, ranks 1536 and 512, head sizes 128 + 64 and 128.
    latent = LatentAttention(1536, 512, 128, 64, 128)
    model = ModelShape(60, 5120, 12288, 128, 128, 102400, is_gated=True, latent=latent)
    queries = 5120 * 1536 + 1536 * 128 * 192
    keys_and_values = 5120 * (512 + 64) + 512 * 128 * 256
    output = 128 * 128 * 5120
    assert layer_flops(model, 0) == (2 * (queries + keys_and_values + output + 3 * 5120 * 12288), 2 * 128 * (192 + 128))
    direct = layer_flops(replace(model, latent=replace(latent, query_rank=0)), 0)
    assert direct[0] == 2 * (5120 * 128 * 192 + keys_and_values + output + 3 * 5120 * 12288)


def test_attention_counts_the_pairs_that_the_mask_leaves():
    (cost,) = analytic_costs(replace(GPT_7B, num_layers=1), (1,), COUNT)
    seen = sum(query + 1 for query in range(40, 100))
    head = 2 * 4096 * 32768
    lookup = 2 * 4096
    assert cost.forward(40, 100) == 60 * (24 * 4096**2 + head + lookup) + 4 * 4096 * seen
    # Backward: twice the matrix products, two and a half times the attention; three elements a lookup.
    assert cost.backward(40, 100) == 60 * (2 * (24 * 4096**2 + head) + 3 * 4096) + 2.5 * 4 * 4096 * seen
    assert cost.total(40, 100) == pytest.approx(cost.forward(40, 100) + cost.backward(40, 100))


def test_recomputation_repeats_the_layers_but_not_the_ends():
    plain, recomputing, keeping = (
        analytic_costs(replace(GPT_7B, num_layers=3), (1, 1, 1), COUNT, recompute)
        for recompute in ("none", "full", "all but attention")
    )
    first, middle, last = (cost.forward(0, 10) for cost in plain)
    assert (first - middle, last - middle) == (10 * 2 * 4096, 10 * 2 * 4096 * 32768)
    attention = 4 * 4096 * 10 * 11 / 2
    for stage in range(3):
        again, kept = (costs[stage].backward(0, 10) - plain[stage].backward(0, 10) for costs in (recomputing, keeping))
        assert (again, kept) == (10 * 24 * 4096**2 + attention, 10 * 24 * 4096**2)


def test_short_segments_are_slow_on_a_cpu():
    attention_only = structs.replace(CPU_CORE, matmul_efficiency=1e30, memory_bandwidth=1e30, kernel_latency=0)
    (cost,) = analytic_costs(replace(GPT_7B, num_layers=1), (1,), attention_only)
    per_pair = {n: cost.total(10000, 10000 + n) / (n * (20001 + n) / 2) for n in (100, 191, 192, 767, 768, 4096)}
    assert per_pair[192] / per_pair[768] == pytest.approx(1.35)
    assert per_pair[191] / per_pair[768] == pytest.approx(2.3)
    assert per_pair[100] == pytest.approx(per_pair[191]) and per_pair[768] == pytest.approx(per_pair[4096])


def test_slowest_is_the_highest_of_all_stages_for_every_segment():
    # The last stage leads where the head dominates, the first, with more layers, where the prefix is long.
    costs = analytic_costs(replace(GPT_7B, vocab_size=400000), (18, 14), A100)
    pace = bottleneck_time(costs)
    segments = [(0, 128), (1000, 3000), (60000, 65536), (131072, 262144)]
    assert [pace(*segment) for segment in segments] == [max(c.total(*segment) for c in costs) for segment in segments]
    assert {max((c.total(*segment), i) for i, c in enumerate(costs))[1] for segment in segments} == {0, 1}


MODEL = ModelShape(8, 1024, 4096, 16, 64, 32000)


def test_a_window_is_counted_pair_by_pair():
    time = AnalyticTime(per_pair_in_window=1.0, window=7)
    for start, end in ((0, 3), (0, 20), (5, 12), (7, 8), (30, 50)):
        assert time(start, end) == sum(min(position, 7) + 1 for position in range(start, end))


def test_recurrent_layers_have_no_part_per_pair():
    """A hybrid is cut between even and attention alone."""
    kinds = {"delta_net": DeltaNet(8, 16, 128, 128), "mamba": Mamba(32, 64, 8, 128)}
    spreads = []
    for pattern in ("GM-", "G-G-G-*-", "*-*-*-*-"):
        model = replace(MODEL, num_layers=len(pattern), pattern=pattern, **kinds)
        lengths = balanced(65536, 4, bottleneck_time(analytic_costs(model, (len(pattern),), A100)), 1)
        spreads.append(max(lengths) - min(lengths))
    assert spreads[0] <= 1 < spreads[1] < spreads[2]


def test_each_prediction_head_costs_the_last_stage():
    plain, more = (analytic_costs(replace(MODEL, prediction_depth=depth), (4, 4), COUNT) for depth in (0, 2))
    assert more[0] == plain[0]
    layer = analytic_costs(replace(MODEL, num_layers=2), (1, 1), COUNT)[1].forward(1000, 3000)
    joined = 2 * 2000 * 4 * MODEL.hidden_size**2
    assert more[1].forward(1000, 3000) == pytest.approx(plain[1].forward(1000, 3000) + 2 * layer + joined)


TINY = ModelShape(4, 256, 1024, 4, 64, 512)
UNEVEN, LENGTHS = (3, 1), (3584, 1888, 1472, 1248)


def test_times_of_both_halves_add_up_to_the_backward():
    stages, lengths = analytic_costs(TINY, UNEVEN, CPU_CORE), LENGTHS
    costs = action_costs(stages, UNEVEN, lengths)
    start = 0
    for segment, length in enumerate(lengths):
        for stage, cost in enumerate(stages):
            assert costs.duration(Kind.F, stage, segment) == cost.forward(start, start + length)
            assert costs.duration(Kind.B, stage, segment) == pytest.approx(cost.backward(start, start + length))
            # The matrix products of a layer, 24 h² a token, and on the last stage those of the head.
            flops = UNEVEN[stage] * 24 * 256**2 + (2 * 256 * 512 if stage else 0)
            assert costs.duration(Kind.W, stage, segment) == pytest.approx(
                flops * length / (CPU_CORE.peak_flops * CPU_CORE.matmul_efficiency)
            )
        start += length
    assert (
        costs.activation == costs.activation_for_w == (tuple(3.0 * n for n in lengths), tuple(1.0 * n for n in lengths))
    )


def test_only_auto_plans_for_the_costs():
    stages = analytic_costs(TINY, (2, 2), CPU_CORE)
    lengths = balanced(8192, 4, bottleneck_time(stages))
    shape, costs = Shape(Placement(2), 2, 4), action_costs(stages, (2, 2), lengths)
    plan = RankSchedules(ScheduleChoice("auto"), lambda lengths: action_costs(stages, (2, 2), lengths))
    for rank in range(2):
        assert [*plan.of_step(shape, lengths, rank, forward_only=False).actions] == lower_rank(
            build("auto", shape, costs), rank, one_queue=True
        )
    refuse = Mock(side_effect=AssertionError)
    assert RankSchedules(ScheduleChoice("1f1b"), refuse).of_step(shape, lengths, 0, forward_only=False)
    assert RankSchedules(ScheduleChoice("auto"), refuse).of_step(shape, lengths, 0, forward_only=True)


def timeline(family: str, lengths=LENGTHS, told=LENGTHS) -> Timeline:
    """A step with the analytic costs of TINY, as if it had been measured."""
    costs = action_costs(analytic_costs(TINY, UNEVEN, CPU_CORE), UNEVEN, lengths)
    step = simulate(build(family, Shape(Placement(2), 3, len(lengths))), costs)
    meta = {} if told is None else {"segment_lengths": list(told)}
    return Timeline(step.shape, step.ranks, "s", meta)


@pytest.mark.parametrize(
    "family, lengths", [("1f1b", LENGTHS), ("zb-h1", LENGTHS), ("1f1b", (2048,) * 4)], ids=["1f1b", "zb-h1", "equal"]
)
def test_costs_are_those_that_the_step_was_made_of(family, lengths):
    costs, errors = traced_costs(timeline(family, lengths, lengths))
    for found, made in zip(costs, analytic_costs(TINY, UNEVEN, CPU_CORE), strict=True):
        for start, end in pairwise((0, *accumulate(lengths))):
            for part in ("forward", "backward", "weight"):
                assert getattr(found, part)(start, end) == pytest.approx(getattr(made, part)(start, end), rel=0.02)
    assert max(errors) < 0.01


@pytest.mark.parametrize(
    "time",
    [AnalyticTime(0.2, 1e-4, 1e-8), AnalyticTime(0.0, 1e-4, 1e-8), AnalyticTime(0.0, 0.0, 1e-8), AnalyticTime(0.3)],
    ids=str,
)
def test_fit_finds_the_parts_of_a_time(time):
    bounds = [(0, 900), (900, 1500), (1500, 1900), (1900, 2100)]
    fitted = fit_time([TimedSegment(end - start, start, time(start, end)) for start, end in bounds])
    assert fitted(300, 1000) == pytest.approx(time(300, 1000), rel=1e-6)


def test_no_part_of_a_time_is_negative():
    fitted = fit_time([TimedSegment(100, 0, 1.0), TimedSegment(200, 100, 1.5), TimedSegment(300, 300, 1.0)])
    assert min(fitted.fixed, fitted.per_token, fitted.per_pair) >= 0


def test_a_trace_without_lengths_is_an_error(tmp_path):
    write_timeline(timeline("1f1b", told=None), tmp_path / "trace.json")
    with pytest.raises(ValueError, match="does not have the lengths of at least two segments"):
        read_traced_costs(tmp_path / "trace.json", 2)
