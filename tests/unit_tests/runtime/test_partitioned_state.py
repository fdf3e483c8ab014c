"""Whole gradients that parameters have between the reduction and the step of the optimizer."""

from types import SimpleNamespace

import torch

from megatron.seq1f1b.runtime.gradients import partition_patches
from megatron.seq1f1b.runtime.gradients.partitioned_state import PartitionedChunk, Share


def test_a_step_that_is_repeated_adds_to_megatrons_buffers():
    """Megatron's rerun state machine clears gradients and runs a step again, without a step of the optimizer."""
    parameter, gradients = torch.nn.Parameter(torch.zeros(4)), torch.ones(4)
    parameter.main_grad = view = gradients[:]
    bucket = SimpleNamespace(
        param_data=torch.zeros(4), grad_data=gradients, params_list=[parameter], param_to_index={parameter: (0, 4)}
    )
    chunk = object.__new__(PartitionedChunk)
    chunk.shares, chunk._is_reducing = [Share(bucket, 0, 2)], False
    chunk.shares[0].lend_gradients()
    assert parameter.main_grad is not view
    partition_patches._zero_shares(lambda ddp: None, SimpleNamespace(partitioned_state=chunk))
    assert parameter.main_grad is view and not chunk.shares[0].gradients.any()
