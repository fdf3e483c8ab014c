"""The time of one operation: a matrix product, attention, moving data, a collective, a message. Seconds.

A multiprocessor computes one tile of a matrix product at a time. The last wave of tiles may leave some idle, and every
tile takes time to fill and drain, so small matrices are slower for each FLOP (NVIDIA, "Matrix Multiplication Background
User's Guide"). A ring moves the bytes of a collective over its slowest link; the ranks of a node share its links to
other nodes.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from .blocks import BYTES
from .machine import Device, Machine

# Rows, columns, and speed relative to the largest tile. Its efficiency is fitted; the other speeds are guesses.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.65))
# Steps along the dimension that is summed over, which take as long as to fill and drain a tile: a guess.
_TILE_OVERHEAD = 128
_BLOCK = 128  # queries of a head, in the backward keys, on a multiprocessor at a time (arXiv 2307.08691, section 3.2)


@lru_cache(maxsize=1 << 16)
def matmul_time(device: Device, rows: float, columns: float, inner: float, batch: float = 1) -> float:
    """`batch` products of [rows, inner] and [inner, columns] in 16 bit."""
    if min(rows, columns, inner, batch) <= 0:
        return 0.0
    per_unit = device.peak_flops * device.matmul_efficiency / device.multiprocessors
    best = float("inf")
    for tile_rows, tile_columns, speed in _TILES:
        tiles = ceil(rows / tile_rows) * ceil(columns / tile_columns) * batch
        waves = ceil(tiles / device.multiprocessors)
        best = min(best, waves * 2 * tile_rows * tile_columns * (inner + _TILE_OVERHEAD) / (per_unit * speed))
    moved = BYTES * batch * (rows * inner + inner * columns + rows * columns)
    return max(best, moving_time(device, moved)) + device.kernel_latency


def moving_time(device: Device, num_bytes: float, num_kernels: int = 0) -> float:
    """`num_kernels` kernels that read and write `num_bytes` in all."""
    return num_bytes / (device.memory_bandwidth * device.memory_efficiency) + num_kernels * device.kernel_latency


def flash_time(
    device: Device, queries: int, keys: int, pairs: float, heads: float, head_dim: float, backward: bool = False
) -> float:
    """FlashAttention of `queries` on `keys`, with `pairs` of both in each head; `heads` are those of all sequences,
    `head_dim` is the mean size of a key and a value."""
    flops = (10 if backward else 4) * heads * head_dim * pairs  # the backward computes the scores again
    rate = device.peak_flops * (device.flash_backward if backward else device.flash_forward)
    # Small heads wait for the exponentials: those of 64 reach 0.85 of the rate (arXiv 2307.08691, section 4.1).
    rate *= min(1.0, 0.7 + 0.3 * head_dim / 128)
    # Few blocks leave multiprocessors without work, and the last wave is full by half on average.
    blocks = ceil((keys if backward else queries) / _BLOCK) * heads
    idle = device.multiprocessors / (2 * blocks) if blocks else 0.0
    return flops / rate * (1 + min(idle, device.multiprocessors)) + device.kernel_latency


@dataclass(frozen=True)
class Group:
    """`size` ranks at a distance of `stride` ranks."""

    size: int
    stride: int

    def in_node(self, machine: Machine) -> int:
        """The number of its ranks in a node."""
        return min(self.size, max(1, machine.devices_per_node // self.stride))


def all_gather_time(machine: Machine, group: Group, num_bytes: float) -> float:
    """All-gather or reduce-scatter over a ring; `num_bytes` is the size of the whole, on every rank."""
    if group.size == 1:
        return 0.0
    here, node, network = group.in_node(machine), machine.node, machine.network
    bandwidth = node.bandwidth
    if here < group.size:  # as many groups as `devices / here` leave a node side by side
        way_out = min(network.bandwidth * here / machine.devices_per_node, network.message_bandwidth * here)
        bandwidth = min(bandwidth, way_out) if here > 1 else way_out
    hops = ceil(log2(here)) * node.latency
    hops += ceil(log2(ceil(group.size / here))) * network.latency
    return num_bytes * (group.size - 1) / group.size / bandwidth + hops


def all_reduce_time(machine: Machine, group: Group, num_bytes: float) -> float:
    """A reduce-scatter and an all-gather in one."""
    return 2 * all_gather_time(machine, group, num_bytes)


def all_to_all_time(machine: Machine, group: Group, num_bytes: float) -> float:
    """Every rank holds `num_bytes` and keeps one of `size` parts; all ranks of a node send to other nodes at once."""
    if group.size == 1:
        return 0.0
    here = group.in_node(machine)
    inside = num_bytes * (here - 1) / group.size / machine.node.bandwidth
    if here == group.size:
        return inside + machine.node.latency * ceil(log2(here))
    share = min(machine.network.bandwidth / machine.devices_per_node, machine.network.message_bandwidth)
    outside = num_bytes * (group.size - here) / group.size / share
    return max(inside, outside) + machine.network.latency * ceil(log2(group.size / here))


def message_time(machine: Machine, source: int, destination: int, num_bytes: float, senders: int) -> float:
    """A message from rank to rank, while `senders` ranks of a node send to other nodes at once."""
    devices, network = machine.devices_per_node, machine.network
    if source // devices == destination // devices:
        return machine.node.latency + num_bytes / machine.node.message_bandwidth
    bandwidth = network.message_bandwidth
    if senders > 1:  # over TCP, collectives reach less than one message alone
        bandwidth = min(bandwidth, network.bandwidth / senders)
    return network.latency + num_bytes / bandwidth
