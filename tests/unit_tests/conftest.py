import pytest
import torch
import torch.distributed as dist

from megatron.seq1f1b.platform import stand_ins


@pytest.fixture
def memory_of_the_process(monkeypatch):
    """`torch.cuda` counts the memory of this process, as in training on a CPU."""
    for name, new in (
        ("reset_peak_memory_stats", stand_ins.forget_peak),
        ("memory_allocated", stand_ins.resident_bytes),
        ("max_memory_allocated", stand_ins.peak_resident_bytes),
    ):
        monkeypatch.setattr(torch.cuda, name, new)


@pytest.fixture
def alone(monkeypatch, memory_of_the_process):
    """A world of one rank without a GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
