"""The double of Transformer Engine's operators computes what PyTorch's own functions do."""

import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

from support import te_operators

EPS = 1e-5
ROWS, WIDTH = 6, 8


# With a weight that is the difference from 1, as Qwen3-Next has it.
zero_centered = pytest.mark.parametrize("zero_centered", [False, True])


@zero_centered
def test_rms_norms_are_those_of_torch(zero_centered):
    x, weight, _, grad = drawn()
    output, means, scale = te_operators.rmsnorm_fwd(x, weight, EPS, None, None, None, 0, zero_centered)
    assert means is None
    expected = rms_norm(x, [WIDTH], weight + zero_centered, EPS)
    torch.testing.assert_close(output, expected)
    gradients = te_operators.rmsnorm_bwd(grad, x, scale, weight, 0, zero_centered)
    for mine, other in zip(gradients, torch.autograd.grad(expected, [x, weight], grad), strict=True):
        torch.testing.assert_close(mine, other)


@zero_centered
def test_layer_norms_are_those_of_torch(zero_centered):
    x, weight, bias, grad = drawn()
    output, means, scale = te_operators.layernorm_fwd(x, weight, bias, EPS, None, None, None, 0, zero_centered)
    expected = layer_norm(x, [WIDTH], weight + zero_centered, bias, EPS)
    torch.testing.assert_close(output, expected)
    gradients = te_operators.layernorm_bwd(grad, x, means, scale, weight, 0, zero_centered)
    for mine, other in zip(gradients, torch.autograd.grad(expected, [x, weight, bias], grad), strict=True):
        torch.testing.assert_close(mine, other)


def drawn() -> list[torch.Tensor]:
    """Rows [n, h], a weight [h], a bias [h], and a gradient [n, h]."""
    random = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (WIDTH,), (WIDTH,), (ROWS, WIDTH))
    return [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in shapes]
