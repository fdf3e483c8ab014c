"""Recurrent layers by segments.

A segment starts from the state after the previous segment, and its backward returns the gradient of that state: that of
the recurrence in fp32, [b, h, d_k, d_v] or [b, h, p, n], and the last input columns of the convolution. A layer
provides one function, from its input and a state to its output and the next state (gated_delta_net.py, mamba.py).
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..carried import Carried
from ..packed_documents import pieces
from ..segment import Segment, SegmentContext

State = tuple[Tensor, ...]  # [b, ...] for b sequences
# From an input [n, b, ...] and the state before it, None at the start of a sequence, to output and next state.
Recurrence = Callable[[Tensor, State | None], tuple[Tensor, State]]


def run_recurrence(context: SegmentContext, layer: Any, recurrence: Recurrence, inputs: Tensor) -> Tensor:
    """The output [n, b, ...] of `recurrence` for the running segment's inputs [n, b, ...]. Documents start without a
    state. The state after a segment is a leaf in the graph of the next one, and lives until the segment's backward."""
    segment = context.running_segment
    if segment.is_whole_sequence:
        return _within_documents(recurrence, inputs, None, segment)[0]
    states: States = context.carried(layer, States)
    output, state = _within_documents(recurrence, inputs, states.after(segment.index - 1), segment)
    if not segment.is_last:
        states.keep(segment.index, state, context.has_backward(output))
    context.end_forward(layer, output)
    if segment.is_last:
        return output
    take = partial(states.take, segment.index)
    return _Leave.apply(output, take, context.at_end_of_backward(layer), *state)


class States(Carried):
    """The state of a layer after each segment, by its number, until that segment's backward."""

    def __init__(self) -> None:
        self._after: dict[int, State] = {}

    def after(self, index: int) -> State | None:
        """None before the first segment."""
        return self._after.get(index)

    def keep(self, index: int, state: State, has_backward: bool) -> None:
        """Keep the state after a segment. A repeated forward does not replace the first, which is in the next segment's
        graph."""
        self._after.setdefault(index, tuple(x.detach().requires_grad_(has_backward) for x in state))

    def take(self, index: int) -> State:
        return self._after.pop(index)

    def tensors(self) -> Iterable[Tensor]:
        return chain.from_iterable(self._after.values())

    def end_forward(self, has_graph: bool, has_backward: bool) -> None:
        if not has_backward:  # the next segment reads the latest state only
            latest = max(self._after)
            self._after = {latest: self._after[latest]}


class _Leave(torch.autograd.Function):
    """The output, unchanged; its backward removes the leaves of the state, and passes their gradients on."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, take: Callable[[], State], end: Callable, *state: Tensor) -> Tensor:
        ctx.take = take
        ctx.end = end
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        grads = [x.grad for x in ctx.take()]
        ctx.end()
        return grad_output, None, None, *grads


def _within_documents(
    recurrence: Recurrence, inputs: Tensor, state: State | None, segment: Segment
) -> tuple[Tensor, State]:
    """The output and the state after a segment; documents that end in it pass nothing on."""
    if segment.documents is None:
        return recurrence(inputs, state)
    outputs = []
    states = []
    for sequence, starts in enumerate(segment.documents):
        of_sequence = slice(sequence, sequence + 1)
        outputs_of_sequence = []
        for piece in pieces(starts, segment.start, segment.end):
            tokens = slice(piece.start - segment.start, piece.end - segment.start)
            before = None
            if state is not None and piece.first_key < segment.start:
                before = tuple(x[of_sequence] for x in state)
            output, after = recurrence(inputs[tokens, of_sequence], before)
            outputs_of_sequence.append(output)
        outputs.append(torch.cat(outputs_of_sequence))
        states.append(after)
    state_of_all = tuple(torch.cat(of_sequences) for of_sequences in zip(*states, strict=True))
    return torch.cat(outputs, 1), state_of_all


def causal_convolution(
    convolve: Callable[[Tensor], Tensor], x: Tensor, before: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """A causal convolution over `width` tokens of x [b, n, d] and the columns [b, width − 1, d] before it, zeros if
    they are None, and the last columns, from which the next segment starts. `convolve` pads with zeros in front."""
    if before is None:
        before = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    x = torch.cat([before, x], 1)
    # A copy: a view would keep the whole segment alive.
    return convolve(x)[:, width - 1 :], x[:, x.shape[1] - width + 1 :].contiguous()
