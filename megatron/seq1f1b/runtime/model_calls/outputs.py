"""The model's outputs for the segments of a micro-batch, joined for the program, and their gradient, cut again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...model import PieceLogits, Segment


@dataclass(slots=True)
class _Leaf:
    """One leaf of the output for a micro-batch.

    - `whole`: of all its segments, or what is no tensor with values for each token, as the first segment has it.
    - `dimension`: that of the tokens, if it has values for each.
    - `logits`: of the first segment, if they are computed in pieces; the leaf is then their hidden states.
    """

    whole: Any
    dimension: int | None
    has_gradient: bool
    logits: PieceLogits | None
    gradient: Tensor | None = None


class Outputs:
    """The outputs of the last stage for one micro-batch of `length` tokens, divided among `num_shares` ranks.

    An output is any structure of tensors with values for each token. Every segment is copied into one buffer when it
    has gone forward, so a program that asks for logits holds them once, and those of one segment beside them. Of logits
    that are computed in pieces (model/memory/token_logits.py) the hidden states are joined. With
    `rearranged(tensor, dimension)` a joined tensor gets its tokens as the program has them.
    """

    def __init__(
        self, length: int, num_shares: int = 1, rearranged: Callable[[Tensor, int], Tensor] | None = None
    ) -> None:
        self._length = length // num_shares
        self._num_shares = num_shares
        self._rearranged = rearranged
        self._tree: TreeSpec | None = None
        self._leaves: list[_Leaf] = []
        self._with_gradient: list[_Leaf] = []  # those of them that have one

    def add(self, output: Any, segment: Segment) -> Tensor:
        """Take the output for a segment, in order; the scalar that stands for it in the backward. Raises ValueError for
        a tensor with no dimension that counts the tokens, and for a number that differs from segment to segment."""
        start = segment.start // self._num_shares
        length = segment.length // self._num_shares
        values, tree = tree_flatten(output)
        logits: dict[int, PieceLogits] = {}  # those that are computed in pieces, by their place among the values
        for place, value in enumerate(values):
            if isinstance(value, PieceLogits):
                logits[place] = value
                values[place] = value.hidden
        if segment.is_first:
            self._tree = tree
            self._leaves = [
                self._first(value, logits.get(place), length, segment.is_whole_sequence)
                for place, value in enumerate(values)
            ]
            self._with_gradient = [leaf for leaf in self._leaves if leaf.has_gradient]
        else:
            for leaf, value in zip(self._leaves, values, strict=True):
                _require_equal(leaf, value)
            for leaf, value in zip(self._leaves, values, strict=True):
                _require_tokens(leaf, value, length)
        if not segment.is_whole_sequence:
            for leaf, value in zip(self._leaves, values, strict=True):
                if leaf.dimension is not None:
                    leaf.whole.narrow(leaf.dimension, start, length).copy_(value.detach())
        with_gradient = [value for leaf, value in zip(self._leaves, values, strict=True) if leaf.has_gradient]
        return _StandIn.apply(self, start, length, *with_gradient)

    def joined(self) -> Any:
        """The output for the whole micro-batch, once. Its gradient ends here."""
        if self._with_gradient:
            anchor = torch.empty((), requires_grad=True)
            tensors = _Joined.apply(anchor, [leaf.whole for leaf in self._with_gradient], self)
            for leaf, tensor in zip(self._with_gradient, tensors, strict=True):
                leaf.whole = tensor
        values = []
        for leaf in self._leaves:
            value = leaf.whole
            leaf.whole = None  # from now on the program's
            if self._rearranged is not None and leaf.dimension is not None:
                value = self._rearranged(value, leaf.dimension)
            if leaf.logits is not None:
                value = leaf.logits.joined_as(value)
                leaf.logits = None
            values.append(value)
        self._leaves = []
        assert self._tree is not None, "outputs are joined before there is one"
        return tree_unflatten(values, self._tree)

    def receive(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Take the gradients of the joined tensors; None for one that the loss does not depend on."""
        for leaf, gradient in zip(self._with_gradient, gradients, strict=True):
            leaf.gradient = gradient

    def gradients(self, start: int, length: int) -> list[Tensor | None]:
        """The gradients of the tensors of a segment."""
        return [_of_segment(leaf, start, length) for leaf in self._with_gradient]

    def _first(self, value: Any, logits: PieceLogits | None, segment_length: int, is_whole: bool) -> _Leaf:
        """A leaf, from its value for the first segment, with room for all segments."""
        dimension = _token_dimension(value, segment_length, is_whole)
        whole = value
        if isinstance(value, Tensor):
            if dimension is None or value.shape[dimension] == self._length:
                whole = value.detach()
            else:
                whole = value.new_empty([*value.shape[:dimension], self._length, *value.shape[dimension + 1 :]])
        return _Leaf(whole, dimension, _has_gradient(value), logits)


def _require_equal(leaf: _Leaf, value: Any) -> None:
    """Raise ValueError for a number that is another one in the first segment."""
    if isinstance(value, (int, float)) and value != leaf.whole:
        raise ValueError(
            f"the model returns {leaf.whole} for one segment and {value} for another, and only values for each token "
            "can be joined to those of the whole sequence; let it return such, or drop --sequence-splits"
        )


def _require_tokens(leaf: _Leaf, value: Any, segment_length: int) -> None:
    """A size that was that of the first segment by chance is found here, if a later one has another length."""
    if leaf.dimension is not None and value.shape[leaf.dimension] != segment_length:
        raise _no_values_of_tokens(value, segment_length)


def _of_segment(leaf: _Leaf, start: int, length: int) -> Tensor | None:
    """The gradient of a segment."""
    if leaf.gradient is None or leaf.dimension is None:
        return leaf.gradient
    return leaf.gradient.narrow(leaf.dimension, start, length)


class _StandIn(torch.autograd.Function):
    """A scalar for the tensors of a segment, which frees them; its backward hands them their part of the gradient."""

    @staticmethod
    def forward(ctx: Any, outputs: Outputs, start: int, length: int, *tensors: Tensor) -> Tensor:
        ctx.outputs = outputs
        ctx.start = start
        ctx.length = length
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return tensors[0].new_zeros(()) if tensors else torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        gradients = ctx.outputs.gradients(ctx.start, ctx.length)
        for place, (shape, dtype, device) in enumerate(ctx.like):
            if gradients[place] is None:
                # The segment goes backward even if the loss does not depend on this output: its caches end there.
                gradients[place] = torch.zeros(shape, dtype=dtype, device=device)
        return None, None, None, *gradients


class _Joined(torch.autograd.Function):
    """Tensors that are no leaves and no views, since programs scale logits in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor], outputs: Outputs) -> tuple[Tensor, ...]:
        ctx.outputs = outputs
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.outputs.receive(gradients)
        return None, None, None


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _token_dimension(leaf: Any, segment_length: int, is_whole: bool) -> int | None:
    """The dimension of an output that counts tokens: the second of [b, n, ...], else another one."""
    if not isinstance(leaf, Tensor):
        return None
    for dimension in (1, 0, *range(2, leaf.dim())):
        if dimension < leaf.dim() and leaf.shape[dimension] == segment_length:
            return dimension
    if is_whole:
        return None
    raise _no_values_of_tokens(leaf, segment_length)


def _no_values_of_tokens(leaf: Tensor, segment_length: int) -> ValueError:
    return ValueError(
        f"the model returns a tensor {list(leaf.shape)} for a segment of {segment_length} tokens, which cannot be "
        "joined to one of the whole sequence; let it return values for each token, or drop --sequence-splits"
    )
