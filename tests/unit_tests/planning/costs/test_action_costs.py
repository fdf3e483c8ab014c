"""From costs of segments to costs of actions, and the plan that `auto` makes of them."""

import pytest

from megatron.seq1f1b.partition import balanced
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.stage_costs import CPU_CORE, action_costs, analytic_costs, bottleneck_time
from megatron.seq1f1b.runtime.program import Programs
from megatron.seq1f1b.schedule import Kind, Placement, ScheduleChoice, Shape, build, lower_rank, peak_memory, simulate

MODEL = ModelShape(4, 256, 1024, 4, 64, 512)
LAYERS = (3, 1)


def test_times_of_both_halves_add_up_to_the_backward():
    stages, lengths = analytic_costs(MODEL, LAYERS, CPU_CORE), (3584, 1888, 1472, 1248)
    costs = action_costs(stages, LAYERS, lengths)
    start = 0
    for segment, length in enumerate(lengths):
        for stage, cost in enumerate(stages):
            assert costs.duration(Kind.F, stage, segment) == cost.forward(start, start + length)
            assert costs.duration(Kind.B, stage, segment) == pytest.approx(cost.backward(start, start + length))
            # The matrix products of a layer, 24 h² a token, and on the last stage those of the head.
            flops = LAYERS[stage] * 24 * 256**2 + (2 * 256 * 512 if stage else 0)
            assert costs.duration(Kind.W, stage, segment) == pytest.approx(
                flops * length / (CPU_CORE.peak_flops * CPU_CORE.matmul_efficiency)
            )
        start += length
    assert costs.activation == costs.kept == (tuple(3.0 * n for n in lengths), tuple(1.0 * n for n in lengths))


def test_only_auto_plans_for_the_costs():
    stages = analytic_costs(MODEL, (2, 2), CPU_CORE)
    lengths = balanced(8192, 4, bottleneck_time(stages))
    shape, costs = Shape(Placement(2), 2, 4), action_costs(stages, (2, 2), lengths)
    plan = Programs(ScheduleChoice("auto"), lambda lengths: action_costs(stages, (2, 2), lengths))
    for rank in range(2):
        assert [*plan.program(shape, lengths, rank, forward_only=False).actions] == lower_rank(
            build("auto", shape, costs), rank, one_queue=True
        )
    planned, named = build("auto", shape, costs), build("zb-h1", shape)
    assert simulate(planned, costs).makespan < simulate(named, costs).makespan
    assert max(peak_memory(planned, costs)) <= max(peak_memory(build("1f1b", shape), costs))

    def refuse(lengths):
        raise AssertionError("asked for")

    assert Programs(ScheduleChoice("1f1b"), refuse).program(shape, lengths, 0, forward_only=False)
    assert Programs(ScheduleChoice("auto"), refuse).program(shape, lengths, 0, forward_only=True)
