"""What a configuration does that its user may not expect, in sentences without their full stop."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from ..arguments import PipelineConfig
from ..arguments.supported import Use, first_unsupported
from ..partition import segment_times
from .costs.machine import Machine
from .costs.model_shape import ModelShape
from .costs.stage_costs import CPU_CORE, analytic_costs
from .run_costs import RunCosts

# Differences of predicted steps below this are not worth a line.
_WORTH_A_LINE = 0.01


def advice(config: PipelineConfig, costs: RunCosts) -> Iterator[str]:
    """The sentences on `config`, which was made with these `costs`."""
    flags = costs.flags
    if config.num_segments > 1:
        yield from _of_short_segments(config, costs)
        if flags.means_equal_lengths and flags.sequence_split_strategy is None and config.run.has_sizes:
            yield from _of_equal_lengths(config, costs)
    yield from _of_unused_flags(config, flags)


def _of_unused_flags(config: PipelineConfig, flags: argparse.Namespace) -> Iterator[str]:
    """Which of our flags have no effect."""
    if flags.pipeline_schedule_file is not None and flags.pipeline_schedule is not None:
        yield f"--pipeline-schedule-file takes the place of --pipeline-schedule {flags.pipeline_schedule}"
    schedule = config.schedule
    is_planned = schedule is not None and schedule.is_planned
    if flags.sequence_split_profile and not is_planned and not config.partition.uses_profile:
        yield "--sequence-split-profile has no effect: these cuts follow no measured times"
    if schedule is not None and schedule.is_planned and not schedule.split:
        obstacle = first_unsupported(config.run.settings, {Use.SPLIT_BACKWARDS})
        yield f"--pipeline-schedule auto plans without splitting backwards: {obstacle}"


def _of_equal_lengths(config: PipelineConfig, costs: RunCosts) -> Iterator[str]:
    """What equal lengths cost where no flag asked for them by name."""
    schedule, length = config.schedule, config.run.sequence_length
    assert schedule is not None, "segments have a schedule"
    balanced = replace(config.partition, strategy="balanced")
    try:
        equal, better = (
            costs.forecast(schedule, lengths).seconds for lengths in (config.lengths, balanced.cut(length))
        )
    except ValueError:  # what segments of this model cost is not known
        return
    if equal > (1 + _WORTH_A_LINE) * better:
        yield (
            "without --sequence-split-strategy these segments have equal lengths, with which the predicted step takes "
            f"{100 * (equal / better - 1):.0f} % longer than with --sequence-split-strategy balanced"
        )


def _of_short_segments(config: PipelineConfig, costs: RunCosts) -> Iterator[str]:
    """Where segments are too short for the device that runs them."""
    if costs.machine.name == "cpu":
        shortest = min(config.lengths)
        if shortest < CPU_CORE.full_speed_rows:
            yield (
                f"the shortest segment has {shortest} tokens; on a CPU attention is up to 2.3 times slower for "
                f"segments of less than {CPU_CORE.full_speed_rows}; fewer --sequence-splits or a longer --seq-length "
                "avoid that"
            )
    elif costs.model is not None:
        yield from _of_waiting_gpus(config, costs.model, costs.machine)


def _of_waiting_gpus(config: PipelineConfig, model: ModelShape, machine: Machine) -> Iterator[str]:
    """The host takes equally long to launch the layer of any segment.

    The most segments that keep the device busy are the time of a whole sequence over that of the host. The length that
    is enough follows from the shortest segment, nearly in proportion.
    """
    run, lengths, host = config.run, config.lengths, machine.host.layer_forward
    # Tensor- and context-parallel ranks share a segment.
    devices = run.tensor_parallel_size * (run.settings.get("context_parallel_size") or 1) / run.micro_batch_size
    device = replace(machine.device, kernel_latency=0)
    (layers,) = analytic_costs(model, (model.num_layers,), device, num_devices=devices)
    seconds = [time / model.num_layers for time in segment_times(lengths, layers.forward)]
    shortest = min(range(len(seconds)), key=seconds.__getitem__)
    if seconds[shortest] < host:
        most = int(sum(seconds) / host)
        enough = ceil(lengths[shortest] * host / seconds[shortest])
        way_out = f"--sequence-splits {most} keeps GPUs busy" if most > 1 else "whole sequences keep GPUs busier"
        yield (
            f"the segment of {lengths[shortest]} tokens takes a GPU about {1e3 * seconds[shortest]:.2g} ms a layer, "
            f"and its host about {1e3 * host:.2g} ms to launch it, so that the GPU waits, as with all "
            f"segments of less than about {enough} tokens; {way_out}"
        )
