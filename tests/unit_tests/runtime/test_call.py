"""Calls of Megatron that our schedules refuse."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megatron.core.timers import Timers

from megatron.seq1f1b.runtime.call import _check_messages, _check_waits


def check(level: int = 1, ranks: int = 2) -> None:
    _check_waits(SimpleNamespace(timers=Timers(level, "minmax")), SimpleNamespace(size=lambda: ranks))


@pytest.fixture
def backend(monkeypatch):
    """Sets the backend of the pipeline's group."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    return lambda name: monkeypatch.setattr(dist, "get_backend", lambda group: name)


def test_timers_that_wait_for_a_waiting_gpu_are_refused(backend):
    backend("nccl")
    check(level=1)
    check(level=2, ranks=1)
    _check_waits(SimpleNamespace(timers=None), SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match="--timing-log-level 2 .* use --timing-log-level 1, and --pipeline-trace"):
        check(level=2)
    backend("gloo")
    check(level=2)


def test_blocking_launches_are_refused_there_too(backend, monkeypatch):
    backend("nccl")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    check()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match="CUDA_LAUNCH_BLOCKING .* unset it"):
        check()


def test_recomputation_by_micro_batch_is_refused():
    config = SimpleNamespace(variable_seq_lengths=False, num_microbatches_with_partial_activation_checkpoints=1)
    with pytest.raises(ValueError, match="whole micro-batches in flight.*unset it"):
        _check_messages(config, None, None)
