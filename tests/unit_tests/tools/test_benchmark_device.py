"""Every rank of a benchmark has a GPU of its own."""

import pytest
import torch

from benchmarking.device import use_own_gpu


@pytest.fixture
def two_gpus(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize("local_rank, gpu", [("0", 0), ("1", 1), (None, 0)])
def test_a_rank_takes_the_gpu_of_its_number(two_gpus, monkeypatch, local_rank, gpu):
    """A single process, which has none, takes the first."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    use_own_gpu()
    assert two_gpus == [gpu]


def test_more_ranks_than_gpus_are_refused(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SystemExit, match="2 are visible: use --nproc-per-node 2 or less"):
        use_own_gpu()


def test_without_gpus_nothing_is_chosen(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    use_own_gpu()
    assert two_gpus == []
