"""Measure this machine: a file for the --machine of `seq1f1b plan`.

    seq1f1b profile --output mine.toml
    torchrun --no-python --nproc-per-node 8 seq1f1b profile --output mine.toml

Matrix products, attention, copies and small kernels are timed on the GPU if there is one, else on one core of the CPU.
Several ranks also time the links inside a node and between nodes. What is taken from --machine is marked in the file:
peaks of data sheets, and what only whole trainings show.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ..costs.blocks import pairs
from ..costs.machine import Device, Link, Machine, machine_names, read_machine
from ..files.writing import written_whole
from ..process.job_variables import check_job_variables
from .parsing import Parser, output_path

if TYPE_CHECKING:
    from .device_timer import DeviceTimer

# The heads for which the rates of a machine file hold.
_HEADS = 16
_HEAD_DIM = 128
_FEW_QUERIES = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
# Attention of few queries is slow if it takes this many times longer than the same work of long segments.
_SLOW = 1.05
_LARGE = 2**27  # bytes
_SMALL = 8


def make_parser() -> Parser:
    parser = Parser(__doc__)
    names = ", ".join(machine_names())
    parser.add_argument("--machine", metavar="NAME", help=f"{names}, or a file; default: the nearest to this device")
    written = "default: %(default)s"
    output = output_path(".toml")
    parser.add_argument("--output", type=output, default="machine.toml", metavar="FILE.toml", help=written)
    return parser


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    check_job_variables(os.environ, ())
    named = read_machine(args.machine) if args.machine else None
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):  # of the packages that Megatron does without
        from .device_timer import DeviceTimer  # imports torch, which takes seconds

    timer = DeviceTimer()
    base = named or read_machine(timer.nearest)
    device = within_peaks(measured_device(base.device, timer))
    measured = replace(measured_links(base, timer), device=device)
    timer.close()
    if timer.rank == 0:
        text = as_toml(measured, base)
        with written_whole(args.output) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
            check(unfinished)
        print(f"{text}\n{args.output} written. Predict with it by seq1f1b plan --machine {args.output}")


def measured_device(base: Device, timer: DeviceTimer) -> Device:
    """`base` with the shares of its peaks that this device reaches."""
    latency = timer.small_kernel()
    longest = timer.longest
    base = structs.replace(base, name=timer.name, kernel_latency=latency, **timer.sizes)
    at_peak = structs.replace(base, matmul_efficiency=1.0, flash_forward=1.0, flash_backward=1.0, kernel_latency=0.0)

    def attention(queries: int, backward: bool = False) -> float:
        """The share of the peak that the last queries of the longest sequence reach."""
        seen = pairs(longest - queries, longest, None)
        least = at_peak.flash_time(queries, longest, seen, _HEADS, _HEAD_DIM, backward)
        return least / (timer.attention(_HEADS, _HEAD_DIM, queries, longest, backward) - latency)

    forward = attention(longest)
    # All of them: every rank has to take part in every measurement.
    factors = [(queries, forward / attention(queries)) for queries in _FEW_QUERIES]
    slow = list(takewhile(lambda measured: measured[1] > _SLOW, factors))
    products = []  # the shares of the peak that two sizes of matrices reach
    for side in (longest, longest // 2):
        products.append(at_peak.matmul_time(side, side, side) / (timer.product(side) - latency))
    return structs.replace(
        base,
        matmul_efficiency=fmean(products),
        memory_efficiency=_LARGE / base.memory_bandwidth / (timer.move(_LARGE) - latency),
        flash_forward=forward,
        flash_backward=attention(longest, backward=True),
        full_speed_rows=_FEW_QUERIES[min(len(slow), len(_FEW_QUERIES) - 1)],
        slow_attention=tuple((queries + 1, factor) for queries, factor in slow),
        host_bandwidth=timer.host_rate(),
    )


def within_peaks(device: Device) -> Device:
    """The device with higher peaks where it was measured to be faster than its machine file says."""
    compute = max(1.0, device.matmul_efficiency, device.flash_forward, device.flash_backward)
    memory = max(1.0, device.memory_efficiency)
    return structs.replace(
        device,
        peak_flops=device.peak_flops * compute,
        matmul_efficiency=device.matmul_efficiency / compute,
        flash_forward=device.flash_forward / compute,
        flash_backward=device.flash_backward / compute,
        memory_bandwidth=device.memory_bandwidth * memory,
        memory_efficiency=device.memory_efficiency / memory,
    )


def check(path: Path) -> None:
    """Raise ValueError for a file that no prediction can be made with, as where timings are shorter than latencies."""
    try:
        read_machine(path)
    except ValueError as error:
        wrong = str(error).removeprefix(f"{path}: ")
        way_out = "measure again while nothing else runs"
        raise ValueError(f"what was measured makes no machine: {wrong}; {way_out}") from None


def measured_links(base: Machine, timer: DeviceTimer) -> Machine:
    """`base` with the links inside a node and between nodes, if there are such ranks."""

    def link(old: Link, in_node: bool, peer: int) -> Link:
        size = timer.ranks_in_node if in_node else timer.num_ranks
        rate = 2 * _LARGE * (size - 1) / size / timer.all_reduce(_LARGE, in_node)
        latency = timer.message(_SMALL, peer)
        return structs.replace(
            old,
            bandwidth=rate if in_node else rate * timer.ranks_in_node,  # of a whole node to others
            message_bandwidth=_LARGE / (timer.message(_LARGE, peer) - latency),
            latency=latency,
        )

    measured = base
    if timer.ranks_in_node > 1:
        measured = replace(measured, node=link(base.node, in_node=True, peer=1))
    if timer.num_ranks > timer.ranks_in_node:
        measured = replace(measured, network=link(base.network, in_node=False, peer=timer.ranks_in_node))
    return measured


def as_toml(machine: Machine, base: Machine) -> str:
    """A machine file with the source of each constant beside it."""
    lines = [f"# By seq1f1b profile, from the machine {base.name}."]
    for section in ("device", "host", "node", "network"):
        lines += ["", f"[{section}]"]
        if section == "node":
            lines.append(f"devices = {machine.devices_per_node}")
        before = getattr(base, section)
        now = getattr(machine, section)
        for field in structs.fields(now):
            value = getattr(now, field.name)
            source = f"of {base.name}" if value == getattr(before, field.name) else "measured"
            if value != field.default:
                lines.append(f"{field.name} = {_text(value)}  # {source}")
    return "\n".join([*lines, ""])


def _text(value: Any) -> str:
    """A value in TOML, whose strings and lists are those of JSON."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
