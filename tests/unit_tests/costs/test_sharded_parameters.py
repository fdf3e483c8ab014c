"""Megatron's FSDP: replicas keep shares of weights and gradients, and gather and reduce layers beside compute."""

from dataclasses import replace

import pytest
from msgspec import structs

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.stage_times import replica_times, stage_rows
from megatron.seq1f1b.costs.step_memory import static_memory
from megatron.seq1f1b.costs.training_setup import TrainingSetup

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
SHARDED = replace(WHOLE, shards_parameters=True)


def test_two_layers_and_embeddings_are_whole():
    weights, gradients, optimizer = static_memory(SHARDED, 0)
    of_whole = static_memory(WHOLE, 0)
    layer = sum(WHOLE.layer_parameters())
    shared = of_whole[0] / 16
    assert weights == pytest.approx(shared + 2 * (2 * layer + 2 * WHOLE.embedding_parameters))
    assert gradients == 2 * weights and optimizer == of_whole[2]
    assert sum((weights, gradients)) < 0.25 * sum(of_whole[:2])


def test_what_compute_does_not_hide_takes_its_time():
    slow = replace(MACHINE, network=structs.replace(MACHINE.network, bandwidth=1e9, message_bandwidth=1e9))
    assert stage_rows(SHARDED, MACHINE) == stage_rows(WHOLE, MACHINE)
    reduce, gather = replica_times(SHARDED, slow, *SHARDED.parameters[0])
    ((forward,), (inputs,), (weight,)) = stage_rows(SHARDED, slow)[0]
    action = slow.host.action
    assert (forward, inputs + weight) == (pytest.approx(gather + action), pytest.approx(gather + reduce + action))
    # Every micro-batch gathers and reduces, instead of the whole step once.
    assert predict(SHARDED, slow).seconds > predict(WHOLE, slow).seconds
    assert predict(SHARDED, MACHINE).seconds < predict(WHOLE, MACHINE).seconds
