"""The CUDA kernel without a GPU: its calls fit the operators, by shapes and types alone. Numbers need a GPU."""

import pytest
import torch

from megatron.seq1f1b.model.kernels.cuda import CudaFlash


@pytest.mark.parametrize("start", [0, 48])
@pytest.mark.parametrize("groups", [4, 2])
def test_calls_fit_the_flash_operators(start, groups):
    length, batch, heads, size = 16, 2, 4, 64
    query = torch.empty(length, batch, heads, size, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(start + length, batch, groups, size, dtype=torch.bfloat16, device="meta") for _ in "kv")
    kernel = CudaFlash()
    output, saved = kernel.forward(query, key, value, start, 0.125, 0.1)
    assert output.shape == (length, batch, heads * size)
    grads = kernel.backward(torch.empty_like(output), query, key, value, output, saved, start, 0.125, 0.1)
    assert grads.query.shape == query.shape
    assert grads.key.shape == grads.value.shape == (length, batch, groups, size)
    if start:
        assert all(grad.shape == (start, batch, groups, size) for grad in grads.prefix)
    else:
        assert grads.prefix is None
