"""Megatron's FSDP: replicas keep shares of weights and gradients, and gather and reduce layers beside compute."""

from dataclasses import replace

import pytest
from msgspec import structs

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.simulator import named, predict, timeline_of
from megatron.seq1f1b.costs.stage_times import replica_times, stage_rows, step_costs
from megatron.seq1f1b.costs.step_memory import static_memory
from megatron.seq1f1b.costs.training_setup import Fsdp, TrainingSetup
from megatron.seq1f1b.schedule import Kind

MACHINE = read_machine("h100-80gb")
WHOLE = TrainingSetup(
    preset("llama3-8b"),
    8192,
    2,
    data_parallel=16,
    distributed_optimizer=True,
    overlaps_data_parallel=True,
    keeps_logits=True,
)
SHARDED = replace(WHOLE, fsdp=Fsdp.PARAMETERS)
GRADIENTS = replace(WHOLE, fsdp=Fsdp.GRADIENTS)
OPTIMIZER = replace(WHOLE, fsdp=Fsdp.OPTIMIZER)
SLOW = replace(MACHINE, network=structs.replace(MACHINE.network, bandwidth=1e9, message_bandwidth=1e9))


def test_two_layers_and_embeddings_are_whole():
    weights, gradients, optimizer = static_memory(SHARDED, 0)
    of_whole = static_memory(WHOLE, 0)
    layer = sum(WHOLE.layer_parameters())
    shared = of_whole[0] / 16
    assert weights == pytest.approx(shared + 2 * (2 * layer + 2 * WHOLE.embedding_parameters))
    assert gradients == 2 * weights and optimizer == of_whole[2]
    assert sum((weights, gradients)) < 0.25 * sum(of_whole[:2])


def test_what_compute_does_not_hide_takes_its_time():
    assert stage_rows(SHARDED, MACHINE) == stage_rows(WHOLE, MACHINE)
    reduce, gather = replica_times(SHARDED, SLOW, SHARDED.parameters[0])
    ((forward,), (inputs,), (weight,)) = stage_rows(SHARDED, SLOW)[0]
    action = SLOW.host.action
    assert (forward, inputs + weight) == (pytest.approx(gather + action), pytest.approx(gather + reduce + action))
    # Every micro-batch gathers and reduces, instead of the whole step once.
    assert predict(SHARDED, SLOW).seconds > predict(WHOLE, SLOW).seconds


def test_weights_are_whole_where_gradients_are_sharded():
    weights, gradients, optimizer = static_memory(GRADIENTS, 0)
    assert (weights, optimizer) == static_memory(WHOLE, 0)[::2]
    assert gradients == static_memory(SHARDED, 0)[1]
    assert static_memory(OPTIMIZER, 0) == static_memory(WHOLE, 0)


def test_sharded_gradients_are_summed_in_every_backward():
    """A forward gathers nothing, but the first one of a step waits for all parameters."""
    forward, *_ = stage_rows(WHOLE, SLOW)[0]
    forward_beside, (inputs,), (weight,) = stage_rows(GRADIENTS, SLOW)[0]
    reduce, gather = replica_times(GRADIENTS, SLOW, GRADIENTS.parameters[0])
    assert forward_beside == forward
    assert inputs + weight == pytest.approx(reduce + SLOW.host.action)
    step = predict(GRADIENTS, SLOW)
    in_backwards = WHOLE.num_microbatches * reduce
    assert step.seconds == pytest.approx(gather + in_backwards + sum(forward), rel=0.05)
    assert step.seconds < predict(SHARDED, SLOW).seconds
    assert step.ends[0].gather == 0 and 0 < step.ends[0].reduce < 0.05 * reduce


def test_only_shares_of_sharded_gradients_are_cleared():
    moved = 16 * (1 - 1 / 16) * sum(WHOLE.parameters[0])
    saved = predict(OPTIMIZER, MACHINE).ends[0].update - predict(GRADIENTS, MACHINE).ends[0].update
    assert saved == pytest.approx(MACHINE.device.moving_time(moved))


def test_gradients_are_summed_in_16_bit():
    """As by --megatron-fsdp-grad-comm-dtype; DistributedDataParallel sums what it accumulates, in 32."""
    (reduce, gather), (of_whole, gather_once) = (
        replica_times(each, MACHINE, WHOLE.parameters[0]) for each in (SHARDED, WHOLE)
    )
    assert reduce == gather == gather_once
    assert gather < of_whole < 2 * gather  # twice the bytes over as many hops
    assert replica_times(OPTIMIZER, MACHINE, WHOLE.parameters[0]) == (reduce, gather)
    assert predict(OPTIMIZER, SLOW).seconds < predict(WHOLE, SLOW).seconds


@pytest.mark.parametrize("rate", [360e9, 40e9, 1e9])
@pytest.mark.parametrize("splits", [1, 4])
def test_buckets_go_beside_the_only_chunk_of_a_rank(rate, splits):
    """32 layers: a forward waits for the parameters of one, a backward leaves the gradients of one to be sent. Only the
    last segment to go backward has gradients that are final."""
    machine = replace(MACHINE, network=structs.replace(MACHINE.network, bandwidth=rate, message_bandwidth=rate / 8))
    setup = replace(WHOLE, segments=(8192 // splits,) * splits)
    costs = step_costs(setup, machine)
    timeline = timeline_of(setup, machine, named(setup.family, setup.shape), costs)
    spans = {kind: [span for span in timeline.ranks[0] if span.action.kind is kind] for kind in (Kind.F, Kind.B)}
    reduce, gather = replica_times(setup, machine, setup.parameters[0])
    forward = costs.f[0][0]
    backward = costs.i[0][0] + costs.w[0][0]
    assert spans[Kind.F][0].start == pytest.approx(max(gather / 32, gather - 31 / 32 * forward))
    left = timeline.makespan - spans[Kind.B][-1].end
    assert left == pytest.approx(max(reduce / 32, reduce - 31 / 32 * backward))
    assert predict(setup, machine).seconds > timeline.makespan
