"""How long one operation takes: a matrix product, attention, moving data, a collective, a message. Seconds.

A matrix product is cut into tiles, one for a multiprocessor at a time. The tiles of the last wave may leave some
without work, and every tile takes some time to fill and drain: small matrices and short segments are slower for
each FLOP (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantization). No kernel is faster
than its operands can be read and its result written. A ring moves the bytes of a collective over its slowest link; the
ranks of a node share its links to other nodes.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from .blocks import BYTES
from .machine import Device, Machine

# Rows, columns, and speed relative to the largest tile, which reuses its operands most. The speeds are guesses:
# libraries choose among dozens of kernels, and the fitted efficiency of a machine is that of the largest tile.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.65))
# To fill and drain a tile takes as long as this many steps along the dimension that is summed over: a guess.
_TILE_OVERHEAD = 128
# FlashAttention gives a multiprocessor a block of so many queries of one head, two blocks at a time; in the backward it
# is a block of keys (arXiv 2307.08691, section 3.2).
_BLOCK = 128


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
    """FlashAttention of `queries` queries on `keys` keys, of which they see `pairs` in all, in each head; `heads` are
    those of all sequences, `head_dim` the mean size of a key and of a value.

    The backward computes the scores again: five products for the two of the forward. Heads of less than 128 leave the
    tensor cores waiting for the exponentials, whose number does not depend on the size of a head (arXiv 2307.08691,
    section 4.1: heads of 64 reach about 0.85 of the rate).
    """
    flops = (10 if backward else 4) * heads * head_dim * pairs
    rate = device.peak_flops * (device.flash_backward if backward else device.flash_forward)
    rate *= min(1.0, 0.7 + 0.3 * head_dim / 128)  # a line through heads of 64 and of 128
    # Few blocks leave multiprocessors without work, and the last wave is full by half on average.
    blocks = ceil((keys if backward else queries) / _BLOCK) * heads
    idle = device.multiprocessors / (2 * blocks) if blocks else 0.0
    return flops / rate * (1 + min(idle, device.multiprocessors)) + device.kernel_latency


@dataclass(frozen=True)
class Group:
    """`size` ranks that are `stride` ranks apart."""

    size: int
    stride: int

    def in_node(self, machine: Machine) -> int:
        """How many of them share a node."""
        return min(self.size, max(1, machine.devices_per_node // self.stride))


def bus_bandwidth(machine: Machine, group: Group) -> float:
    """Bytes/s that every rank of a ring sends and receives."""
    here = group.in_node(machine)
    if here == group.size:
        return machine.node.bandwidth
    # As many groups as `devices / here` leave a node side by side.
    way_out = min(machine.network.bandwidth * here / machine.devices_per_node, machine.network.message_bandwidth * here)
    return min(machine.node.bandwidth, way_out) if here > 1 else way_out


def all_gather_time(machine: Machine, group: Group, num_bytes: float) -> float:
    """All-gather or reduce-scatter; `num_bytes` is the size of the whole, on every rank."""
    if group.size == 1:
        return 0.0
    here = group.in_node(machine)
    hops = ceil(log2(here)) * machine.node.latency
    hops += ceil(log2(ceil(group.size / here))) * machine.network.latency
    return num_bytes * (group.size - 1) / group.size / bus_bandwidth(machine, group) + hops


def all_reduce_time(machine: Machine, group: Group, num_bytes: float) -> float:
    """A reduce-scatter and an all-gather in one."""
    return 2 * all_gather_time(machine, group, num_bytes)


def all_to_all_time(machine: Machine, group: Group, num_bytes: float) -> float:
    """Every rank holds `num_bytes` and keeps one part of `size` of it; all of a node send to other nodes at once."""
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
