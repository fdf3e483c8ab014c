"""Collectives in a node, and over the way out that the ranks of a node share."""

import pytest

from megatron.seq1f1b.planning.costs.machine import read_machine
from megatron.seq1f1b.planning.costs.operations import Group, all_reduce_time, bus_bandwidth, message_time

MACHINE = read_machine("a100-vtrain")


@pytest.mark.parametrize(
    "group, bandwidth",
    [
        (Group(8, 1), MACHINE.node.bandwidth),
        (Group(16, 1), MACHINE.network.bandwidth),
        (Group(4, 8), MACHINE.network.bandwidth / 8),
    ],
    ids=["in a node", "full nodes", "one rank a node"],
)
def test_groups_have_the_bus_of_the_node_or_a_share_of_the_exit(group, bandwidth):
    assert bus_bandwidth(MACHINE, group) == bandwidth


def test_a_ring_moves_twice_the_bytes_but_for_one_part():
    size = 1e12  # so large that latency does not count
    expected = 2 * size * 7 / 8 / MACHINE.node.bandwidth
    assert all_reduce_time(MACHINE, Group(8, 1), size) == pytest.approx(expected, rel=1e-4)
    assert all_reduce_time(MACHINE, Group(1, 1), size) == 0


def test_messages_stay_in_the_node_or_share_the_way_out():
    inside = message_time(MACHINE, 0, 7, 1e9, senders=8)
    assert inside == pytest.approx(1e9 / MACHINE.node.message_bandwidth, rel=1e-2)
    assert message_time(MACHINE, 7, 8, 1e9, senders=8) == pytest.approx(8e9 / MACHINE.network.bandwidth, rel=1e-2)
