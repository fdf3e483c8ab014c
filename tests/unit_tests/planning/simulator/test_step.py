"""The predicted step: laws that hold on any machine."""

from dataclasses import replace

import pytest

from megatron.seq1f1b.planning.costs.machine import read_machine
from megatron.seq1f1b.planning.costs.model_shape import ModelShape
from megatron.seq1f1b.planning.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planning.simulator import estimate
from megatron.seq1f1b.planning.simulator.step import predict
from megatron.seq1f1b.schedule import Placement

MACHINE = read_machine("a100-80gb")
MODEL = ModelShape(32, 4096, 16384, 32, 128, 32768)
SETUP = TrainingSetup(
    MODEL,
    sequence_length=32768,
    num_microbatches=8,
    tensor_parallel=8,
    placement=Placement(4),
    sequence_parallel=True,
    distributed_optimizer=True,
)


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
    alone, sharded = (
        predict(replace(SETUP, data_parallel=4, distributed_optimizer=flag), MACHINE) for flag in (False, True)
    )
    assert sharded.memory[0].optimizer == pytest.approx(alone.memory[0].optimizer / 4)
    assert sharded.ends[0].update < alone.ends[0].update


@pytest.mark.parametrize("family, chunks, segments", [("1f1b", 1, 1), ("1f1b", 2, 4), ("breadth-first", 2, 1)])
def test_a_long_step_extends_short_ones(family, chunks, segments, monkeypatch):
    setup = replace(SETUP, num_microbatches=37, placement=Placement(4, chunks), family=family, layers_per_stage=())
    setup = replace(setup, segments=(32768 // segments,) * segments)
    whole = predict(setup, MACHINE)
    monkeypatch.setattr(estimate, "_MOST_ACTIONS", 0)
    extended = predict(setup, MACHINE)
    assert extended.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert [each.total for each in extended.memory] == pytest.approx([each.total for each in whole.memory], rel=0.01)
    assert extended.bubble == pytest.approx(whole.bubble, abs=0.01)


def test_segments_that_do_not_add_up_are_a_mistake():
    with pytest.raises(ValueError, match="segments of 100 tokens do not make 32768"):
        replace(SETUP, segments=(50, 50))
