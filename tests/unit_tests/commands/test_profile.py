"""`seq1f1b profile` finds the constants of a machine whose operations take as long as this package predicts."""

from dataclasses import replace

import pytest
from msgspec import structs

from megatron.seq1f1b.commands import profile
from megatron.seq1f1b.costs.blocks import pairs
from megatron.seq1f1b.costs.machine import read_machine

H100 = read_machine("h100-80gb")
DEVICE = structs.replace(
    H100.device, name="another H100", multiprocessors=114, matmul_efficiency=0.5, memory_efficiency=0.7
)
DEVICE = structs.replace(DEVICE, flash_forward=0.6, flash_backward=0.5, kernel_latency=7e-6, host_bandwidth=30e9)
SLOW_BELOW, SLOWER = 192, 1.5


class Predicted:
    """Stands in for the clock of a machine of two nodes."""

    name, longest = DEVICE.name, 8192
    sizes = {"memory_gib": 93.1, "multiprocessors": DEVICE.multiprocessors}
    num_ranks, ranks_in_node = 16, 8

    def product(self, side):
        return DEVICE.matmul_time(side, side, side)

    def attention(self, heads, head_dim, queries, keys, backward):
        seen = pairs(keys - queries, keys, None)
        seconds = DEVICE.flash_time(queries, keys, seen, heads, head_dim, backward)
        return seconds if queries >= SLOW_BELOW else (seconds - DEVICE.kernel_latency) * SLOWER + DEVICE.kernel_latency

    def small_kernel(self):
        return DEVICE.kernel_latency

    def move(self, num_bytes):
        return DEVICE.moving_time(num_bytes, 1)

    def host_rate(self):
        return DEVICE.host_bandwidth

    def all_reduce(self, num_bytes, in_node):
        ranks, rate = (8, 300e9) if in_node else (16, 20e9)
        return 2 * num_bytes * (ranks - 1) / ranks / rate

    def message(self, num_bytes, peer):
        return 1e-6 * peer + num_bytes / (80e9 / peer)


def test_known_constants_are_found_and_written(tmp_path, monkeypatch):
    clock, path = Predicted(), tmp_path / "mine.toml"
    device = profile.measured_device(H100.device, clock)
    path.write_text(profile.as_toml(replace(profile.measured_links(H100, clock), device=device), H100))
    read = read_machine(path)
    device = read.device
    for name in ("matmul_efficiency", "memory_efficiency", "flash_forward", "flash_backward", "host_bandwidth"):
        assert getattr(device, name) == pytest.approx(getattr(DEVICE, name), rel=1e-3), name
    assert (device.name, device.memory_gib, device.multiprocessors) == ("another H100", 93.1, 114)
    assert device.slow_attention == tuple((rows + 1, pytest.approx(SLOWER, rel=1e-3)) for rows in (32, 64, 128))
    assert device.full_speed_rows == SLOW_BELOW
    assert read.node.bandwidth == pytest.approx(300e9) and read.network.bandwidth == pytest.approx(160e9)
    assert read.node.message_bandwidth == pytest.approx(80e9, rel=1e-3)
    assert read.network.message_bandwidth == pytest.approx(10e9, rel=1e-3)
    assert (read.node.latency, read.network.latency) == (pytest.approx(1e-6, rel=1e-3), pytest.approx(8e-6, rel=1e-3))
    assert read.host == H100.host and device.peak_flops == H100.device.peak_flops
    monkeypatch.setattr(Predicted, "num_ranks", 1)
    monkeypatch.setattr(Predicted, "ranks_in_node", 1)
    assert profile.measured_links(H100, Predicted()) == H100, "without other ranks, the links are those of the base"


def test_a_device_faster_than_the_nearest_file_has_higher_peaks():
    """Shares of more than all could not be read again; times stay as they are."""
    fast = structs.replace(DEVICE, matmul_efficiency=2.5, flash_forward=1.5, memory_efficiency=1.2)
    found = profile.within_peaks(fast)
    assert found.matmul_efficiency == found.memory_efficiency == 1 and found.flash_forward < 1
    sizes = (4096, 4096, 4096)
    assert found.matmul_time(*sizes) == pytest.approx(fast.matmul_time(*sizes))
    assert found.flash_time(8192, 8192, 8192**2, 16, 128) == pytest.approx(
        fast.flash_time(8192, 8192, 8192**2, 16, 128)
    )
    assert profile.within_peaks(DEVICE) == DEVICE


def test_a_measurement_that_makes_no_machine_is_a_sentence(tmp_path):
    text = profile.as_toml(replace(H100, device=structs.replace(DEVICE, matmul_efficiency=-0.5)), H100)
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(
        ValueError, match="what was measured makes no machine: device.matmul_efficiency: .*; measure again"
    ):
        profile.check(tmp_path / "mine.toml")
