"""What layers other than plain attention and MLP cost, and where balanced cuts lie because of them."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.partition import balanced, even
from megatron.seq1f1b.planning.costs import (
    A100,
    AnalyticTime,
    DeltaNet,
    Mamba,
    ModelShape,
    analytic_costs,
    bottleneck_time,
)

LENGTH = 65536
MODEL = ModelShape(8, 1024, 4096, 16, 64, 32000)
DELTA_NET, MAMBA = DeltaNet(8, 16, 128, 128), Mamba(32, 64, 8, 128)


def cut(model):
    return balanced(LENGTH, 4, bottleneck_time(analytic_costs(model, (model.num_layers,), A100)), 1)


def hybrid(pattern):
    return replace(MODEL, num_layers=len(pattern), pattern=pattern, delta_net=DELTA_NET, mamba=MAMBA)


def spread(lengths):
    return max(lengths) - min(lengths)


def test_a_window_is_counted_pair_by_pair():
    time = AnalyticTime(per_pair_in_window=1.0, window=7)
    for start, end in ((0, 3), (0, 20), (5, 12), (7, 8), (30, 50)):
        assert time(start, end) == sum(min(position, 7) + 1 for position in range(start, end))


def test_attention_and_mlp_apart_cost_as_much_as_one_layer():
    whole, apart = (
        analytic_costs(model, (model.num_layers,), replace(A100, kernel_latency=0.0))[0].total(1000, 3000)
        for model in (MODEL, hybrid("*-" * 8))
    )
    assert apart == pytest.approx(whole)


def test_recurrent_layers_have_no_part_per_pair():
    (cost,) = analytic_costs(hybrid("GM-"), (3,), A100)
    assert cost.forward(0, 1000) == cost.forward(50000, 51000)
    assert spread(cut(hybrid("GM-"))) <= 1


def test_a_hybrid_is_cut_between_even_and_attention_alone():
    attention, mixed = cut(hybrid("*-*-*-*-")), cut(hybrid("G-G-G-*-"))
    assert spread(even(LENGTH, 4, 1)) < spread(mixed) < spread(attention)


def test_each_prediction_head_costs_the_last_stage():
    plain, more = (
        analytic_costs(replace(MODEL, prediction_depth=depth), (4, 4), replace(A100, kernel_latency=0.0))
        for depth in (0, 2)
    )
    assert more[0] == plain[0]
    layer = analytic_costs(replace(MODEL, num_layers=2), (1, 1), replace(A100, kernel_latency=0.0))[1].forward(
        1000, 3000
    )
    joined = 2 * 2000 * 4 * MODEL.hidden_size**2 / (A100.peak_flops * A100.matmul_efficiency)
    assert more[1].forward(1000, 3000) == pytest.approx(plain[1].forward(1000, 3000) + 2 * layer + joined)


def test_windows_make_the_balanced_cut_even():
    every = replace(MODEL, window=512, window_layers=tuple(range(8)))
    half = replace(MODEL, window=512, window_layers=(0, 2, 4, 6))
    assert spread(cut(every)) < LENGTH / 200
    assert spread(cut(every)) < spread(cut(half)) < spread(cut(MODEL))
