"""What a configuration takes at least, without simulating it."""

from dataclasses import replace

from ..costs.machine import Machine
from ..costs.memory import activation_tables, static_memory
from ..costs.stage_times import stage_rows, step_end
from ..costs.training_setup import TrainingSetup

# So many micro-batches at once fill all tiles and waves.
_MANY = 256


def least_seconds(setup: TrainingSetup, machine: Machine) -> float:
    """No step is shorter than the compute of a rank, with that before its first and after its last action elsewhere.

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


def least_seconds_of_all(setup: TrainingSetup, machine: Machine) -> float:
    """What no schedule of the set-up and no way to cut its sequences falls below.

    The busiest rank never idles, and its kernels lose nothing to launches, nor to tiles and waves that are not full, as
    it would be for ever larger micro-batches.
    """
    endless = replace(setup, micro_batch_size=_MANY * setup.micro_batch_size)
    work = [(sum(f) + sum(i) + sum(w)) / _MANY for f, i, w in stage_rows(endless, machine)]
    ranks = range(setup.pipeline_parallel)
    busiest = max(sum(work[stage] for stage in setup.placement.stages_of(rank)) for rank in ranks)
    update = max(step_end(setup, machine, rank).update for rank in {0, setup.pipeline_parallel - 1})
    return setup.num_microbatches * busiest + update + machine.host.step


def least_bytes(setup: TrainingSetup) -> float:
    """What the fullest rank holds at least: weights, gradients, optimizer state, and on the first rank the activations
    of one micro-batch, which every schedule holds at once."""
    ranks = range(setup.pipeline_parallel)
    activation, _ = activation_tables(replace(setup, segments=(setup.sequence_length,)))
    held = sum(activation[stage][0] for stage in setup.placement.stages_of(0))
    return max(sum(static_memory(setup, rank)) + (held if rank == 0 else 0.0) for rank in ranks)
