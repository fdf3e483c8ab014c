"""Linear layers in 8 bits by segments, on a stand-in for Transformer Engine's recipes.

A recipe gives the tensors of a matrix product scales: along the summed dimension one for each block of values, or one
for a whole tensor. Segments part the tokens, which the weight gradient sums over.
"""

import pytest
import torch

from megatron.seq1f1b import validate
from unit_tests.arguments.parsed import parsed

TOKENS, SEQUENCES, WIDTH = 256, 2, 128
LARGEST = 448.0  # of e4m3


def in_8_bits(x: torch.Tensor, block: int | None) -> torch.Tensor:
    """x [r, c] as e4m3 holds it, by one scale for each `block` values of a row, or one for all."""
    missing = 0 if block is None else -x.shape[1] % block
    parts = torch.nn.functional.pad(x, (0, missing)).unflatten(1, (-1, block or x.shape[1]))
    dims = (0, 1, 2) if block is None else 2
    scale = parts.abs().amax(dims, keepdim=True).clamp(min=1e-12) / LARGEST
    return ((parts / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale).flatten(1)[:, : x.shape[1]]


def gradients(x, weight, grad, block):
    """Output, input gradient and weight gradient of x [r, c] · weightᵀ, each product of two tensors in 8 bits."""
    output = in_8_bits(x, block) @ in_8_bits(weight, block).mT
    grad_input = in_8_bits(grad, block) @ in_8_bits(weight.mT.contiguous(), block).mT
    grad_weight = in_8_bits(grad.mT.contiguous(), block) @ in_8_bits(x.mT.contiguous(), block).mT
    return output, grad_input, grad_weight


def by_segments(lengths, x, weight, grad, block):
    """The same for segments of sequences x [n, b, c], which Transformer Engine flattens to rows of tokens."""
    parts = [
        gradients(inputs.flatten(0, 1), weight, grads.flatten(0, 1), block)
        for inputs, grads in zip(x.split(lengths), grad.split(lengths), strict=True)
    ]
    outputs, grad_inputs, grad_weights = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(grad_inputs), sum(grad_weights)


def tensors():
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, TOKENS, SEQUENCES, WIDTH, dtype=torch.float64, generator=generator)
    growing = torch.linspace(0.01, 1, TOKENS, dtype=torch.float64).view(-1, 1, 1)
    return x * growing, torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator), grad * growing


@pytest.mark.parametrize("recipe, block", [("mxfp8", 32), ("blockwise", 128)])
@pytest.mark.parametrize("segments", ["2", "3"])
def test_whole_blocks_in_segments_give_the_same_gradients(segments, recipe, block):
    """Where the flags cut."""
    sizes = {"seq_length": TOKENS, "micro_batch_size": SEQUENCES, "fp8": "hybrid", "fp8_recipe": recipe}
    lengths = validate(parsed("--sequence-splits", segments, **sizes)).lengths
    assert len(lengths) == int(segments)
    whole, parts = by_segments([TOKENS], *tensors(), block), by_segments(lengths, *tensors(), block)
    for got, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block, lengths", [(32, (120, 136)), (128, (96, 160)), (None, (128, 128))])
def test_other_lengths_and_scales_of_whole_tensors_do_not(block, lengths):
    *_, whole = by_segments([TOKENS], *tensors(), block)
    *_, parts = by_segments(lengths, *tensors(), block)
    assert (parts - whole).abs().max() > 1e-4 * whole.abs().max()
