"""A warning where segments are too short for the device that runs them."""

import argparse
import logging
from itertools import accumulate
from math import ceil

from ..planning.costs import CPU_CORE, layer_flops
from ..planning.costs.machine import Machine
from ..ranks import warn_on_rank_0
from .config import PipelineConfig
from .device import nearest_machine
from .megatron_run import MegatronRun

_log = logging.getLogger(__name__)


def warn_of_short_segments(config: PipelineConfig, flags: argparse.Namespace) -> None:
    """To be called once in a process."""
    if config.num_segments == 1:
        return
    if config.partition.throughput is CPU_CORE:
        _warn_of_slow_kernels(min(config.lengths))
    elif config.run.model is not None:
        machine = nearest_machine(flags)
        _warn_of_waiting_gpus(config.lengths, _layer_seconds(config.run, config.lengths, machine), machine)


def _warn_of_slow_kernels(shortest: int) -> None:
    if shortest < CPU_CORE.full_speed_rows:
        warn_on_rank_0(
            _log,
            f"the shortest segment has {shortest} tokens; on a CPU attention is up to 2.3 times slower for "
            f"segments of less than {CPU_CORE.full_speed_rows}. Fewer --sequence-splits or a longer --seq-length "
            "avoid that.",
        )


def _warn_of_waiting_gpus(lengths: tuple[int, ...], seconds: list[float], machine: Machine) -> None:
    """`seconds` holds the forward time of a layer for each segment; the host takes equally long for all of them.

    Of all numbers of segments whose layers keep the device busy, the largest is the whole time over the host's. How
    long a segment has to be follows from the shortest one, nearly in proportion.
    """
    host = machine.host.layer_forward
    shortest = min(range(len(seconds)), key=seconds.__getitem__)
    if seconds[shortest] < host:
        most = int(sum(seconds) / host)
        enough = ceil(lengths[shortest] * host / seconds[shortest])
        way_out = f"--sequence-splits {most} keeps GPUs busy" if most > 1 else "whole sequences keep GPUs busier"
        warn_on_rank_0(
            _log,
            f"the segment of {lengths[shortest]} tokens takes a GPU about {1e3 * seconds[shortest]:.2g} ms a layer, "
            f"and its host about {1e3 * host:.2g} ms to launch it, so that the GPU waits, as with all "
            f"segments of less than about {enough} tokens; {way_out}.",
        )


def _layer_seconds(run: MegatronRun, lengths: tuple[int, ...], machine: Machine) -> list[float]:
    """Time of the forward of a segment in a layer on the device, the mean over all layers."""
    assert run.model is not None
    layers = [layer_flops(run.model, layer) for layer in range(run.model.num_layers)]
    # Context-parallel ranks share the tokens of a segment and the heads of its attention.
    devices = run.tensor_parallel_size * (run.settings.get("context_parallel_size") or 1)
    device, share = machine.device, run.micro_batch_size / devices
    token = sum(each.per_token for each in layers) / (device.peak_flops * device.matmul_efficiency)
    pair = sum(each.per_pair for each in layers) / (device.peak_flops * device.flash_forward)
    ends = accumulate(lengths)
    # A query sees the keys before it: half of those of its own segment.
    return [
        share * (token * length + pair * length * (end - length / 2)) / len(layers)
        for length, end in zip(lengths, ends, strict=True)
    ]
