import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def alone(monkeypatch):
    """A world of one rank without a GPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
