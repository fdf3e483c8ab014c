"""State that a recurrent layer passes from one segment to the next, and its gradients, which come back in reverse.

A layer provides one function, from its input and a state to its output and the next state. All else is here: a segment
starts from the state that the segment before left, and its backward passes the gradient of that state back to that
segment.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .packed_documents import pieces
from .segment import Segment, SegmentContext

# Tensors [b, ...] for b sequences.
State = tuple[Tensor, ...]
# From an input [n, b, ...] and the state before it, None at the start of a sequence, to the output [n, b, ...] and the
# state after it.
Recurrence = Callable[[Tensor, State | None], tuple[Tensor, State]]


def run_recurrence(context: SegmentContext, layer: Any, recurrence: Recurrence, inputs: Tensor) -> Tensor:
    """The output [n, b, ...] of `recurrence` for the running segment's inputs [n, b, ...].

    Each document of a packed sequence starts without a state. The state after a segment is a leaf of the graph of the
    next one; it lives from the forward of the segment that leaves it to the backward of that segment.
    """
    segment = context.segment
    assert segment is not None, "outside segments a layer runs by itself"
    states: dict[int, State] = context.cache(layer, dict)  # after each segment, by its number
    output, state = _within_documents(recurrence, inputs, states.get(segment.index - 1), segment)
    if not context.keeps_for_backward:
        states.pop(segment.index - 1, None)
    if not segment.is_last:
        release = partial(context.release, layer, segment.microbatch)
        return _Leave.apply(output, segment, states, release, *state)
    if not context.keeps_for_backward or segment.is_first:
        context.release(layer, segment.microbatch)
    return output


class _Leave(torch.autograd.Function):
    """Returns the output unchanged; the state goes to `states`, and its gradient comes from there."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, segment: Segment, states: dict[int, State], release: Callable, *state: Tensor
    ) -> Tensor:
        # Recomputation runs a forward twice, and leaves the state that the next segment's graph has.
        states.setdefault(segment.index, tuple(x.detach().requires_grad_() for x in state))
        ctx.segment, ctx.states, ctx.release = segment, states, release
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        grads = (x.grad for x in ctx.states.pop(ctx.segment.index))
        if ctx.segment.is_first:
            ctx.release()
        return grad_output, None, None, None, *grads


def _within_documents(
    recurrence: Recurrence, inputs: Tensor, state: State | None, segment: Segment
) -> tuple[Tensor, State]:
    """Output and state after a segment; documents that end inside it pass nothing on."""
    if segment.documents is None:
        return recurrence(inputs, state)
    outputs, states = [], []
    for sequence, starts in enumerate(segment.documents):
        of_sequence = slice(sequence, sequence + 1)
        found = []
        for piece in pieces(starts, segment.start, segment.end):
            tokens = slice(piece.start - segment.start, piece.end - segment.start)
            goes_on = state is not None and piece.first_key < segment.start
            before = tuple(x[of_sequence] for x in state) if goes_on else None
            output, after = recurrence(inputs[tokens, of_sequence], before)
            found.append(output)
        outputs.append(torch.cat(found))
        states.append(after)
    return torch.cat(outputs, 1), tuple(torch.cat(parts) for parts in zip(*states, strict=True))


def causal_convolution(
    convolve: Callable[[Tensor], Tensor], x: Tensor, before: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """A causal convolution over `width` tokens of x [b, n, d] after the columns [b, width − 1, d] before it.

    `convolve` pads with zeros in front, as convolutions of whole sequences do; so does None for `before`. Also returns
    the last columns, which the next segment starts from.
    """
    if before is None:
        before = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    x = torch.cat([before, x], 1)
    # A copy: a view would keep the whole segment alive.
    return convolve(x)[:, width - 1 :], x[:, x.shape[1] - width + 1 :].contiguous()
