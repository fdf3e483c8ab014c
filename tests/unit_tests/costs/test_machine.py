"""Machine files, and what is wrong with one; collectives in a node, and over the way out that its ranks share."""

import re
from pathlib import Path

import pytest
from msgspec import structs

from megatron.seq1f1b.costs import machine
from megatron.seq1f1b.costs.machine import Group, read_machine
from megatron.seq1f1b.costs.model_shape import Experts


@pytest.mark.parametrize("name", machine.machine_names())
def test_machines_of_the_package_can_be_read(name):
    assert read_machine(name).name == name


H100 = Path(machine.__file__).with_name("machines").joinpath("h100-80gb.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("peak_flops", "peak_flop", "device: 'peak_flop' is unknown; did you mean peak_flops?"),
        ("[host]", "[hosts]", "'hosts' is unknown; did you mean host?"),
        ("latency = 20e-6", "", "network: 'latency' is missing"),
        (
            "bandwidth = 360e9 ",
            "bandwidth = -1 ",
            "node.bandwidth: expected a number from 1,000,000 on, not -1; rates are in FLOP/s and bytes/s",
        ),
        ("peak_flops = 989e12", "peak_flops = 0", "device.peak_flops: expected a number from 1,000,000 on, not 0"),
        ("peak_flops = 989e12", "peak_flops = 1e300", "device.peak_flops: expected a number below 1e+30, not 1e+300"),
        ("peak_flops = 989e12", "peak_flops = nan", "device.peak_flops: expected a number from 1,000,000 on, not nan"),
        (
            "peak_flops = 989e12",
            "peak_flops = 989",
            "device.peak_flops: expected a number from 1,000,000 on, not 989; rates",
        ),
        ("memory_gib = ", "memory_gib = 85e9 #", "device.memory_gib: expected a number below 32,768, not 85000000000"),
        ("latency = 20e-6", "latency = 20", "network.latency: expected a number of at most 0.05, not 20; rates"),
        ("latency = 20e-6", "latency = 0.5", "network.latency: expected a number of at most 0.05, not 0.5; rates"),
        (
            "kernel_latency = 4e-6",
            "kernel_latency = 0.5",
            "device.kernel_latency: expected a number of at most 0.01, not 0.5; rates",
        ),
        ("action = 0.3e-3", "action = 0.3", "host.action: expected a number of at most 0.1, not 0.3; rates"),
        ("expert = 0.165e-3", "expert = 0.165", "host.expert: expected a number of at most 0.1, not 0.165; rates"),
        ("latency = 20e-6", "latency = nan", "network.latency: expected a number"),
        ("peak_flops = 989e12", "peak_flops = true", "device.peak_flops: expected a number, not true"),
        ("= 0.58 ", "= 77 ", "device.matmul_efficiency: expected a number of at most 1, not 77"),
        ("devices = 8", "devices = 0", "node.devices: expected a whole number from 1 on, not 0"),
        ("devices = 8", "devices = 0.5", "node.devices: expected a whole number, not 0.5"),
        ("error = ", "error = -1  # ", "error: expected a number from 0 on, not -1"),
        ("error = ", "error = 5  # ", "error: expected a number below 1, not 5"),
        (
            "[host]",
            "slow_attention = [[64, 2, 3]]\n[host]",
            "device.slow_attention[0]: expected a list of length 2, not 3",
        ),
        (
            "[host]",
            "slow_attention = [[64, 0.5]]\n[host]",
            "device.slow_attention[0][1]: expected a number from 1 on, not 0.5",
        ),
        ("[host]", "slow_attention = [[64, 2], [32, 2]]\n[host]", "device: the numbers of queries in slow_attention"),
        ("[device]", "[device", "it is not TOML: Expected ']' at the end of a table declaration (at line 10"),
        ("[device]", "\udcff", "it is not UTF-8 text"),
    ],
    ids=ascii,
)
def test_a_wrong_constant_is_named(tmp_path, old, new, sentence):
    path = tmp_path / "mine.toml"
    path.write_bytes(H100.replace(old, new, 1).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: {sentence}")):
        read_machine(path)


def test_a_name_that_is_nearly_that_of_a_machine():
    with pytest.raises(
        ValueError, match="--machine h100: there is no such machine, and no such file; did you mean h100-80gb?"
    ):
        read_machine("h100")


device = read_machine("a100-80gb").device
MACHINE = read_machine("a100-vtrain")


def test_large_products_come_near_the_rate_and_small_ones_do_not():
    rate = device.peak_flops * device.matmul_efficiency

    def efficiency(rows: int) -> float:
        return 2 * rows * 8192 * 8192 / device.matmul_time(rows, 8192, 8192) / rate

    assert efficiency(16384) > 0.93
    assert efficiency(128) < 0.6
    assert efficiency(130) < efficiency(128)  # a second row of tiles for two rows


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
    """A ring moves all bytes but one part, a sum twice as many; these are so large that latency does not count."""
    seconds = 1e12 * (group.size - 1) / group.size / bandwidth
    assert MACHINE.all_gather_time(group, 1e12) == pytest.approx(seconds, rel=1e-4)
    assert MACHINE.all_reduce_time(group, 1e12) == pytest.approx(2 * seconds, rel=1e-4)
    assert MACHINE.all_reduce_time(Group(1, 1), 1.0) == MACHINE.all_to_all_time(Group(1, 1), 1.0) == 0


def test_tokens_take_longer_to_other_nodes():
    inside, outside = (read_machine("h100-80gb").all_to_all_time(Group(size, 1), 1e9) for size in (8, 16))
    assert outside > 3 * inside


@pytest.mark.parametrize(
    "ranks, dispatch, combine",
    [(16, 54.47e9, 53.35e9), (32, 47.36e9, 52.53e9), (64, 41.24e9, 46.57e9)],
)
def test_a_flex_dispatcher_is_as_fast_as_measured(ranks, dispatch, combine):
    """HybridEP on H100, 4096 tokens of 7168 numbers to 8 of all experts, in bytes that nodes receive (DeepEP, branch
    hybrid-ep, docs/README_Hybrid-EP.md)."""
    machine = read_machine("h100-80gb")
    experts = Experts(total=8 * ranks, active=8, ffn_hidden_size=1)
    size = 2 * 4096 * 7168
    nodes = experts.reached(ranks // 8)
    time = machine.multicast_time(Group(ranks, 1), size, nodes, experts.reached(ranks))
    measured = (nodes * size / dispatch + nodes * size / combine) / 2
    assert time == pytest.approx(measured, rel=0.09)


def test_messages_stay_in_the_node_or_share_the_way_out():
    inside = MACHINE.message_time(0, 7, 1e9, senders=8)
    assert inside == pytest.approx(1e9 / MACHINE.node.message_bandwidth, rel=1e-2)
    assert MACHINE.message_time(7, 8, 1e9, senders=8) == pytest.approx(8e9 / MACHINE.network.bandwidth, rel=1e-2)


def test_attention_takes_longer_in_segments_than_in_one_piece():
    def time(segments: int) -> float:
        length = 8192 // segments
        ends = range(length, 8193, length)
        return sum(device.flash_time(length, end, length * (2 * end - length + 1) / 2, 4, 128) for end in ends)

    assert time(1) < time(4) < time(64)


@pytest.mark.parametrize(
    "name, head_dim, length, forward, backward",
    [
        ("gb200-nvl72", 128, 16384, 1622e12, 1226e12),
        ("gb200-nvl72", 128, 32768, 1708e12, 1328e12),
        ("gb200-nvl72", 64, 16384, 1120e12, None),
        ("h200-141gb", 128, 32768, 688e12, 581e12),
    ],
)
def test_attention_is_as_fast_as_published(name, head_dim, length, forward, backward):
    """With cuDNN, and for the heads of 64 with FlashAttention 4."""
    on = read_machine(name).device
    for published, back in ((forward, False), (backward, True)):
        if published is not None:
            flops = (10 if back else 4) * head_dim * 64 * length**2 / 2
            time = on.flash_time(length, length, length**2 / 2, 64, head_dim, back)
            assert flops / time == pytest.approx(published, rel=0.2)


def test_small_heads_are_slower_and_large_ones_no_faster():
    times = [device.flash_time(8192, 8192, 8192**2 / 2, 16 * 128 / size, size) for size in (64, 96, 128, 192)]
    assert times[0] / times[2] == pytest.approx(1 / device.flash_small_heads, rel=0.03)
    assert times[0] > times[1] > times[2] == pytest.approx(times[3], rel=0.03)


def test_kernels_that_read_number_by_number():
    """They take the longer of their numbers and their bytes, and only the latter where no rate is known."""
    slow = structs.replace(device, single_numbers=1e11)
    assert slow.single_time(1e9, 4e9) == pytest.approx(1e-2)
    assert slow.single_time(1e9, 1e11) == slow.moving_time(1e11) > 1e-2
    assert structs.replace(device, single_numbers=0.0).single_time(1e9, 4e9) == device.moving_time(4e9)
