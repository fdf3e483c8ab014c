"""Linear layers in 8 bits by segments, on a stand-in for Transformer Engine's recipes.

A recipe gives the tensors of a matrix product one scale for each block of values along the summed dimension. Segments
part the tokens, which the weight gradient sums over.
"""

import pytest
import torch

from megatron.seq1f1b import validate
from unit_tests.arguments.parsed import parsed

TOKENS, SEQUENCES, WIDTH = 256, 2, 128
LARGEST = 448.0  # of e4m3


def in_8_bits(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [r, c] as e4m3 holds it, by one scale for each `block` values of a row."""
    parts = torch.nn.functional.pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    scale = parts.abs().amax(2, keepdim=True).clamp(min=1e-12) / LARGEST
    return ((parts / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale).flatten(1)[:, : x.shape[1]]


def weight_gradient(lengths, x, grad, block):
    """Of segments of sequences [n, b, c], which Transformer Engine flattens to rows of tokens."""
    rows = ([part.flatten(0, 1).mT.contiguous() for part in whole.split(lengths)] for whole in (grad, x))
    return sum(in_8_bits(grads, block) @ in_8_bits(inputs, block).mT for grads, inputs in zip(*rows, strict=True))


def largest_difference(lengths, block):
    torch.manual_seed(1)
    grows = torch.linspace(0.01, 1, TOKENS, dtype=torch.float64).view(-1, 1, 1)
    x, grad = grows * torch.randn(2, TOKENS, SEQUENCES, WIDTH, dtype=torch.float64)
    whole, parts = (weight_gradient(each, x, grad, block) for each in ([TOKENS], lengths))
    return ((parts - whole).abs().max() / whole.abs().max()).item()


@pytest.mark.parametrize("recipe, block", [("mxfp8", 32), ("blockwise", 128)])
@pytest.mark.parametrize("segments", ["2", "3"])
def test_whole_blocks_in_segments_give_the_same_gradients(segments, recipe, block):
    """Where the flags cut."""
    sizes = {"seq_length": TOKENS, "micro_batch_size": SEQUENCES, "fp8": "hybrid", "fp8_recipe": recipe}
    lengths = list(validate(parsed("--sequence-splits", segments, **sizes)).lengths)
    assert len(lengths) == int(segments) and largest_difference(lengths, block) <= 1e-12
    assert largest_difference([lengths[0] + 8, *lengths[1:-1], lengths[-1] - 8], block) > 1e-4
