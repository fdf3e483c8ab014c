"""Calls of Megatron that our schedules refuse."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.timers import Timers

from megatron.seq1f1b.runtime.step import Step, refuse_waits


def check(level: int = 1, ranks: int = 2) -> None:
    refuse_waits(SimpleNamespace(timers=Timers(level, "minmax")), SimpleNamespace(size=lambda: ranks))


@pytest.fixture
def backend(monkeypatch):
    """Sets the backend of the pipeline's group."""
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    return lambda name: monkeypatch.setattr(dist, "get_backend", lambda group: name)


def test_timers_that_wait_for_a_waiting_gpu_are_refused(backend):
    backend("nccl")
    check(level=1)
    check(level=2, ranks=1)
    refuse_waits(SimpleNamespace(timers=None), SimpleNamespace(size=lambda: 2))
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


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"variable_seq_lengths": True}, "which our schedules fix in advance"),
        ({"num_microbatches_with_partial_activation_checkpoints": 1}, "whole micro-batches in flight.*unset it"),
    ],
)
def test_a_model_that_our_schedules_cannot_follow(setting, words):
    model = SimpleNamespace(config=ModelParallelConfig(**setting))
    with pytest.raises(ValueError, match=words):
        Step(
            forward_step_func=None,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
        )
