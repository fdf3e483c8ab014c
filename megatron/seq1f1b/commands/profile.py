"""Measure this machine: a file for the --machine of `seq1f1b plan`.

    seq1f1b profile --output mine.toml
    torchrun --no-python --nproc-per-node 8 seq1f1b profile --output mine.toml

Matrix products, attention, copies and small kernels are timed on the GPU if there is one, else on one core of the CPU.
Several ranks also time what passes between them: inside a node, and between nodes where there are several. What is
taken from --machine is marked in the file: peaks of data sheets, and what only whole trainings show.
"""

import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import takewhile
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from ..planning.costs.flops import pairs
from ..planning.costs.machine import Device, Link, Machine, machine_names, read_machine
from ..planning.costs.operations import flash_time, matmul_time
from .parsing import Parser, output_path

# The heads for which the rates of a machine file hold.
_HEADS, _HEAD_DIM = 16, 128
_FEW_QUERIES = (32, 64, 128, 192, 256, 384, 512, 768, 1024)
# Attention of few queries is slow if it takes this many times longer than the same work of long segments.
_SLOW = 1.05
_LARGE, _SMALL = 2**27, 8  # bytes
_REPEATS, _SMALL_KERNELS = 5, 200


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    names = ", ".join(machine_names())
    parser.add_argument("--machine", metavar="NAME", help=f"{names}, or a file; default: the nearest to this device")
    output = {"default": "machine.toml", "help": "a .toml; default: machine.toml"}
    parser.add_argument("--output", type=output_path(".toml"), **output)
    args = parser.parse_args(argv)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of the packages that Megatron does without
    timer = DeviceTimer()
    base = read_machine(args.machine or timer.nearest)
    found = replace(base, device=measured_device(base.device, timer), **measured_links(base, timer))
    if timer.num_ranks > 1:
        dist.destroy_process_group()
    if timer.rank == 0:
        text = as_toml(found, base)
        args.output.write_text(text)
        print(f"{text}\n{args.output} written. Predict with it by seq1f1b plan --machine {args.output}")


class DeviceTimer:
    """Median seconds of operations that all ranks run at once, in bf16 on a GPU and in fp32 on a CPU."""

    def __init__(self) -> None:
        self._is_on_gpu = torch.cuda.is_available()
        self._device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self._is_on_gpu else "cpu")
        self._type = {"device": self._device, "dtype": torch.bfloat16 if self._is_on_gpu else torch.float32}
        # The length of the sequences to time attention with, and the side of matrices.
        self.longest = 8192 if self._is_on_gpu else 2048
        self.name, self.nearest, self.sizes = "one core of this machine", "cpu", {}
        if self._is_on_gpu:
            torch.cuda.set_device(self._device)
            found = torch.cuda.get_device_properties(self._device)
            self.name, self.nearest = found.name, "a100-80gb" if "A100" in found.name else "h100-80gb"
            self.sizes = {"memory_gib": found.total_memory / 2**30, "multiprocessors": found.multi_processor_count}
        else:
            torch.set_num_threads(1)
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        self.rank, self.num_ranks, self.ranks_in_node = (int(os.environ.get(name, names[name])) for name in names)
        if self.num_ranks > 1:
            dist.init_process_group("nccl" if self._is_on_gpu else "gloo")
            self._node, _ = dist.new_subgroups(self.ranks_in_node)

    def product(self, side: int) -> float:
        """Of two square matrices."""
        left, right = torch.randn(2, side, side, **self._type)
        return self._seconds(lambda: left @ right)

    def attention(self, heads: int, head_dim: int, queries: int, keys: int, backward: bool) -> float:
        """Of the last queries of a causal sequence."""
        from ..model.kernels import AttentionRule, KernelChoice, Saved

        query = torch.randn(queries, 1, heads, head_dim, **self._type)
        key, value = torch.randn(2, keys, 1, heads, head_dim, **self._type)
        kernel = KernelChoice().kernel(AttentionRule(head_dim**-0.5), query, value)
        if not backward:
            return self._seconds(lambda: kernel.forward(query, key, value))
        output, saved = kernel.forward(query, key, value)
        return self._seconds(lambda: kernel.backward(output, Saved(query, key, value, output, saved)))

    def small_kernel(self) -> float:
        """From the start of one to the start of the next."""
        number = torch.zeros((), **self._type)
        return self._seconds(lambda: [number.add_(1) for _ in range(_SMALL_KERNELS)]) / _SMALL_KERNELS

    def move(self, num_bytes: int) -> float:
        """Read half of so many bytes of the device, and write as many."""
        source = self._bytes(num_bytes // 2)
        target = torch.empty_like(source)
        return self._seconds(lambda: target.copy_(source))

    def host_rate(self) -> float:
        """Bytes/s to the host, and as many back at once."""
        from ..model import link_rate

        return link_rate(self._device, self._meet)

    def all_reduce(self, num_bytes: int, in_node: bool) -> float:
        """Among the ranks of each node, or all ranks."""
        tensor = self._bytes(num_bytes)
        return self._seconds(lambda: dist.all_reduce(tensor, group=self._node if in_node else None))

    def message(self, num_bytes: int, peer: int) -> float:
        """From rank 0 to a peer and back, halved."""
        tensor = self._bytes(num_bytes)

        def there_and_back() -> None:
            for source, target in ((0, peer), (peer, 0)):
                if self.rank == source:
                    dist.send(tensor, target)
                elif self.rank == target:
                    dist.recv(tensor, source)

        return self._seconds(there_and_back) / 2

    def _bytes(self, number: int) -> torch.Tensor:
        return torch.zeros(number, dtype=torch.uint8, device=self._device)

    def _seconds(self, work: Callable[[], object]) -> float:
        """The median of several runs; the first of all warms up."""
        found = []
        for _ in range(_REPEATS + 1):
            self._meet()
            start = time.perf_counter()
            work()
            if self._is_on_gpu:
                torch.cuda.synchronize(self._device)
            found.append(time.perf_counter() - start)
        return median(found[1:])

    def _meet(self) -> None:
        """All ranks wait for each other, and for what their devices still run."""
        if self.num_ranks > 1:
            dist.barrier()
        if self._is_on_gpu:
            torch.cuda.synchronize(self._device)


def measured_device(base: Device, timer: DeviceTimer) -> Device:
    """`base` with the shares of its peaks that this device reaches."""
    latency, longest = timer.small_kernel(), timer.longest
    base = replace(base, name=timer.name, kernel_latency=latency, **timer.sizes)
    at_peak = replace(base, matmul_efficiency=1.0, flash_forward=1.0, flash_backward=1.0, kernel_latency=0.0)

    def attention(queries: int, backward: bool = False) -> float:
        """The share of the peak that the last queries of the longest sequence reach."""
        seen = pairs(longest - queries, longest, None)
        least = flash_time(at_peak, queries, longest, seen, _HEADS, _HEAD_DIM, backward)
        return least / (timer.attention(_HEADS, _HEAD_DIM, queries, longest, backward) - latency)

    forward = attention(longest)
    # All of them: every rank has to take part in every measurement.
    factors = [(queries, forward / attention(queries)) for queries in _FEW_QUERIES]
    slow = list(takewhile(lambda each: each[1] > _SLOW, factors))
    sides = (longest, longest // 2)
    return replace(
        base,
        matmul_efficiency=fmean(matmul_time(at_peak, n, n, n) / (timer.product(n) - latency) for n in sides),
        memory_efficiency=_LARGE / base.memory_bandwidth / (timer.move(_LARGE) - latency),
        flash_forward=forward,
        flash_backward=attention(longest, backward=True),
        full_speed_rows=_FEW_QUERIES[min(len(slow), len(_FEW_QUERIES) - 1)],
        slow_attention=tuple((queries + 1, factor) for queries, factor in slow),
        host_bandwidth=timer.host_rate(),
    )


def measured_links(base: Machine, timer: DeviceTimer) -> dict[str, Link]:
    """The links inside a node and between nodes, if there are such ranks."""

    def link(old: Link, in_node: bool, peer: int) -> Link:
        size = timer.ranks_in_node if in_node else timer.num_ranks
        rate = 2 * _LARGE * (size - 1) / size / timer.all_reduce(_LARGE, in_node)
        latency = timer.message(_SMALL, peer)
        return replace(
            old,
            bandwidth=rate if in_node else rate * timer.ranks_in_node,  # of a whole node to others
            message_bandwidth=_LARGE / (timer.message(_LARGE, peer) - latency),
            latency=latency,
        )

    links = {}
    if timer.ranks_in_node > 1:
        links["node"] = link(base.node, True, 1)
    if timer.num_ranks > timer.ranks_in_node:
        links["network"] = link(base.network, False, timer.ranks_in_node)
    return links


def as_toml(machine: Machine, base: Machine) -> str:
    """A machine file with the source of each constant beside it."""
    lines = [f"# By seq1f1b profile, from the machine {base.name}."]
    for section in ("device", "host", "node", "network"):
        lines += ["", f"[{section}]"] + [f"devices = {machine.devices_per_node}"] * (section == "node")
        before, now = getattr(base, section), getattr(machine, section)
        for field in fields(now):
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
