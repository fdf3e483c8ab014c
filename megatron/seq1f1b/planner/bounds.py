"""What a configuration takes at least, without simulating it."""

from ..costs.kernels import BYTES
from ..costs.machine import Machine
from ..costs.memory import layer_activation, layer_keys_values
from ..costs.stage_times import stage_rows, step_end
from ..costs.training_setup import TrainingSetup


def least_seconds(setup: TrainingSetup, machine: Machine) -> float:
    """No step is shorter than what a rank computes, and the ranks before it until its first and after its last action.

    With weight gradients apart, those of a rank may fill the time after its last input gradient.
    """
    rows = stage_rows(setup, machine)
    work = [sum(f) + sum(i) + sum(w) for f, i, w in rows]
    longest = around = 0.0
    ranks = setup.pipeline_parallel
    for rank in range(ranks):
        total = setup.num_microbatches * sum(work[stage] for stage in setup.placement.stages_of(rank))
        # The end of the step looks alike on all ranks between the first and the last.
        if rank in (0, 1, ranks - 1):
            reduce = step_end(setup, machine, rank).reduce
        longest = max(longest, around + total + reduce)
        f, i, w = rows[rank]
        around += f[0] if setup.splits_backward else f[0] + i[0] + w[0]
    ends = [step_end(setup, machine, rank) for rank in {0, ranks - 1}]
    return longest + max(end.update for end in ends) + max(end.gather for end in ends) + machine.host.step


def static_bytes(setup: TrainingSetup) -> float:
    """Weights, gradients and optimizer state of the fullest rank: what no schedule changes."""
    placement = setup.placement
    most = max(
        sum(setup.stage_parameters(stage) for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)
    )
    sharded = setup.data_group.size if setup.distributed_optimizer else 1
    return most * (BYTES + setup.software.gradient_bytes + 12 / sharded)


def least_bytes(setup: TrainingSetup) -> float:
    """Static bytes and the activations of one micro-batch on the first rank, which every schedule holds at once."""
    layers = sum(setup.layers_per_stage[stage] for stage in setup.placement.stages_of(0))
    whole = 0, setup.sequence_length
    return static_bytes(setup) + layers * (layer_activation(setup, *whole) + layer_keys_values(setup, *whole))
