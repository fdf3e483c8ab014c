"""Groups of ranks on nodes, and how long their collectives and messages take. Seconds.

A ring moves the bytes of a collective over its slowest link; the ranks of a node share its links to other nodes.
"""

from dataclasses import dataclass
from math import ceil, log2

from .machine import Machine


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
