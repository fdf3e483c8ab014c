"""Outputs of segments, joined for the program, and gradients cut for the backwards of segments."""

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch.utils._pytree import register_dataclass

from megatron.seq1f1b.model import Segment
from megatron.seq1f1b.runtime.model_calls.outputs import Outputs

LENGTH = 8
SEGMENTS = [Segment(0, index, *bounds, LENGTH) for index, bounds in enumerate([(0, 5), (5, 8)])]


@dataclass
class Scores:
    log_probs: torch.Tensor
    entropy: torch.Tensor
    name: str = "scores"


register_dataclass(Scores, field_names=["log_probs", "entropy", "name"])


def of_segments(model, inputs, segments=SEGMENTS):
    """The joined outputs of a model, and the scalars for its backwards."""
    outputs = Outputs(LENGTH)
    scalars = [outputs.add(model(inputs[:, each.start : each.end]), each) for each in segments]
    return outputs.joined(), scalars


def compare(model, loss):
    """The gradients of inputs by a loss on joined outputs, and on those of the whole sequence."""
    inputs = torch.randn(2, LENGTH, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(model(inputs)), inputs)
    joined, scalars = of_segments(model, inputs)
    loss(joined).backward()
    assert inputs.grad is None, "the gradient ends at the joined outputs"
    for scalar in reversed(scalars):
        scalar.backward(torch.ones_like(scalar))
    assert torch.allclose(inputs.grad, expected, rtol=1e-14, atol=1e-14)


def scale_in_place(logits):
    logits.div_(0.7)
    return torch.log_softmax(logits, -1)[:, 1:].square().mean()


@pytest.mark.parametrize(
    "model, loss",
    [
        (lambda x: x * 3, scale_in_place),
        (lambda x: (x.sum(-1), x.exp()), lambda both: (both[0][:, :-1] * both[1][:, 1:, 0]).sum()),
        (lambda x: {"logits": x.tanh(), "count": 3}, lambda found: found["logits"][:, -1].sum() * found["count"]),
        (lambda x: Scores(x.sum(-1), x.sin()), lambda found: found.log_probs.sum() + found.entropy.prod(1).sum()),
        (lambda x: (x.square(), x.detach() > 0), lambda found: (found[0] * found[1]).sum()),
        (lambda x: (x.square(), x.sum(-1)), lambda found: found[1][:, 2].sum()),
        (lambda x: x.transpose(0, 1).square(), lambda found: found[2].sum() * found[7].sum()),
    ],
    ids=["in place", "a tuple", "a dict", "a dataclass", "a mask", "one unused", "tokens first"],
)
def test_gradients_are_those_of_whole_sequences(model, loss):
    compare(model, loss)


def test_a_loss_without_gradient_gives_zeros():
    """Segments go backward all the same, since other stages wait for their messages."""
    inputs = torch.randn(2, LENGTH, 4, requires_grad=True)
    _, scalars = of_segments(torch.tanh, inputs)
    for scalar in scalars:
        scalar.backward(torch.ones_like(scalar))
    assert torch.equal(inputs.grad, torch.zeros_like(inputs))


def test_outputs_without_gradients_are_plain_tensors():
    with torch.no_grad():
        joined, scalars = of_segments(torch.tanh, torch.randn(2, LENGTH, 4, requires_grad=True))
    assert not joined.requires_grad and not scalars[0].requires_grad


def test_a_number_that_differs_is_refused():
    with pytest.raises(ValueError, match="returns 5 for one segment and 3 for another, and only values for each token"):
        of_segments(lambda x: (x.square(), x.shape[1]), torch.randn(2, LENGTH, 4))


def test_a_size_of_the_first_segment_by_chance_is_refused():
    """Of a pooled output [b, 5], where the first segment has 5 tokens and the second 3."""
    with pytest.raises(ValueError, match=r"a tensor \[2, 5\] for a segment of 3 tokens, which cannot be joined to"):
        of_segments(lambda x: x.new_ones(2, 5) * x.mean(), torch.randn(2, LENGTH, 4))


def test_logits_are_held_once():
    """No output of a segment outlives its turn; only its graph does."""
    outputs, gone, scalars = Outputs(LENGTH), [], []
    for each in SEGMENTS:
        logits = torch.ones(1, each.length, 1000, requires_grad=True) * 2
        gone.append(weakref.ref(logits))
        scalars.append(outputs.add(logits, each))
        del logits
    assert all(logits() is None for logits in gone) and all(scalar.requires_grad for scalar in scalars)
    assert outputs.joined().shape == (1, LENGTH, 1000)


def test_a_value_for_the_whole_segment_cannot_be_joined():
    with pytest.raises(ValueError, match=r"returns a tensor \[\] for a segment of 5 tokens, which cannot be joined"):
        of_segments(torch.mean, torch.ones(2, LENGTH, 4))
    whole = [Segment(0, 0, 0, LENGTH, LENGTH)]
    joined, _ = of_segments(torch.mean, torch.ones(2, LENGTH, 4), whole)
    assert joined == 1
