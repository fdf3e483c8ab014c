"""Dropout of attention weights: the same masks forward and backward, absent in evaluation."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron.seq1f1b.model import attention
from megatron.seq1f1b.model.kernels.unfused import Unfused
from support import segments

LENGTH, BATCH, HEADS, GROUPS, SIZE = 24, 2, 4, 2, 8
BOUNDS = [0, 7, 18, 24]
KERNELS = {"one block": Unfused, "small blocks": lambda rule: Unfused(rule, scores_at_once=600)}


def inputs():
    torch.manual_seed(1)
    return segments.inputs(LENGTH, (BATCH, HEADS, GROUPS, SIZE, SIZE))


def layer_with_dropout(kernel_of=None, dropout=0.4, **options):
    return segments.attention(SIZE, kernel_of, dropout, **options)


def step(layer, seed, tensors=None):
    """Output and gradients of all segments, whose masks come from `seed`."""
    *tensors, grad = tensors or inputs()
    torch.manual_seed(seed)
    return segments.run(layer, tensors, grad, segments.segments_of(BOUNDS))


def masks(layer, seed):
    """[b, h, s, t]: where weights stay. Values that are unit vectors bring every dropped weight to the output."""
    query, key, *_ = inputs()
    units = torch.eye(LENGTH, dtype=query.dtype)[:, None, None].expand(LENGTH, BATCH, GROUPS, LENGTH)
    grad = torch.zeros(LENGTH, BATCH, HEADS * LENGTH, dtype=query.dtype)
    weights, *_ = step(layer, seed, tensors=(query, key, units, grad))
    return weights.unflatten(2, (HEADS, LENGTH)).permute(1, 2, 0, 3) != 0


@pytest.mark.parametrize("kernel_of", KERNELS.values(), ids=KERNELS)
def test_gradients_are_those_of_autograd_through_the_same_masks(kernel_of):
    layer = layer_with_dropout(kernel_of, 0.3)
    kept = masks(layer, seed=5)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert not (kept & ~seen).any()
    assert kept[..., seen].double().mean() == pytest.approx(0.7, abs=0.05)

    references = segments.expected(*inputs(), mask=kept.double() / 0.7)
    for result, reference in zip(step(layer, seed=5), references, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-13)


def test_segments_have_masks_of_their_own():
    kept = masks(layer_with_dropout(Unfused, 0.5), seed=3)
    heads = kept[..., 18:24, :18].flatten(0, 1)
    assert all(not torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])
    assert not torch.equal(kept[..., 7:13, :7], kept[..., 18:24, :7])


def test_evaluation_drops_nothing():
    layer = layer_with_dropout().eval()
    assert torch.equal(step(layer, 7)[0], step(segments.attention(SIZE), 8)[0])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_random_numbers_are_those_of_megatrons_tracker(monkeypatch, sequence_parallel):
    """With sequence parallelism the whole layer runs on the tracker's state already, and Megatron does not fork."""
    forks = []

    @contextmanager
    def fork():
        forks.append(1)
        yield

    monkeypatch.setattr(attention, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=fork))
    layer = layer_with_dropout(sequence_parallel=sequence_parallel)
    step(layer, 7)
    step(layer.eval(), 7)
    assert len(forks) == (0 if sequence_parallel else len(BOUNDS) - 1)


def test_the_host_does_not_read_a_seed_from_the_device(monkeypatch):
    """It would wait for a GPU, in every layer of every unit."""
    layer, tensors = layer_with_dropout(Unfused), inputs()
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: pytest.fail("read"))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("read"))
    step(layer, 1, tensors=tensors)
