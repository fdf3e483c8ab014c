"""Calls of Megatron that our schedules refuse."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.timers import Timers

from megatron.seq1f1b.runtime.step import Step, refuse_waits


@pytest.mark.parametrize(
    "backend, ranks, level, blocking, words",
    [
        ("nccl", 2, 1, "0", None),
        ("nccl", 1, 2, "1", None),
        ("gloo", 2, 2, "1", None),
        ("nccl", 2, 2, "0", "--timing-log-level 2 .* drop it, and take --pipeline-trace"),
        ("nccl", 2, 1, "1", "CUDA_LAUNCH_BLOCKING .* drop it"),
    ],
)
def test_what_waits_for_a_waiting_gpu_is_refused(monkeypatch, backend, ranks, level, blocking, words):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        refuse_waits(SimpleNamespace(timers=Timers(level, "minmax")), SimpleNamespace(size=lambda: ranks))


@pytest.mark.parametrize(
    "setting, given, words",
    [
        ({}, {"data_iterator": [None, None]}, "^1 model chunks need a data iterator each, but 2 were given$"),
        ({"num_microbatches_with_partial_activation_checkpoints": 1}, {}, "whole micro-batches in flight.*unset it"),
        ({}, {"p2p_communicator": "ours"}, "^a p2p_communicator needs its pg_collection$"),
        ({}, {"p2p_communicator": "ours", "pg_collection": "ours"}, "^a p2p_communicator of its own kind"),
    ],
)
def test_a_call_that_our_schedules_cannot_follow(setting, given, words):
    model = SimpleNamespace(config=ModelParallelConfig(**setting))
    with pytest.raises(ValueError, match=words):
        sizes = {"num_microbatches": 1, "seq_length": 1, "micro_batch_size": 1}
        Step(**{"forward_step_func": None, "data_iterator": None, "model": model} | sizes | given)
