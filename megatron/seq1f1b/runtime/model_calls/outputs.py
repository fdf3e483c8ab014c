"""The model's outputs for the segments of a micro-batch, joined for the program, and their gradient, cut again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...model import PieceLogits, Segment


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
        self._logits: dict[int, PieceLogits] = {}  # of the first segment, by the places of their hidden states
        self._leaves: list[Any] = []  # of the last segment, but buffers in place of tensors
        self._dimensions: list[int | None] = []  # of the tokens in each leaf
        self._differentiable: list[int] = []  # the places of the leaves that have a gradient
        self._gradients: list[Tensor | None] = []  # of these

    def add(self, output: Any, segment: Segment) -> Tensor:
        """Take the output for a segment, in order; the scalar that stands for it in the backward. Raises ValueError for
        a tensor with no dimension that counts the tokens, and for a number that differs from segment to segment."""
        start = segment.start // self._num_shares
        length = segment.length // self._num_shares
        leaves, tree = tree_flatten(output)
        logits = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, PieceLogits)}
        for place, leaf in logits.items():
            leaves[place] = leaf.hidden
        if segment.is_first:
            self._tree = tree
            self._logits = logits
            self._dimensions = [_token_dimension(leaf, length, segment.is_whole_sequence) for leaf in leaves]
            pairs = zip(leaves, self._dimensions, strict=True)
            self._leaves = [self._buffer(leaf, dimension) for leaf, dimension in pairs]
            self._differentiable = [place for place, leaf in enumerate(leaves) if _has_gradient(leaf)]
        else:
            self._require_equal_numbers(leaves)
            self._require_tokens(leaves, length)
        if not segment.is_whole_sequence:
            for buffer, leaf, dimension in zip(self._leaves, leaves, self._dimensions, strict=True):
                if dimension is not None:
                    buffer.narrow(dimension, start, length).copy_(leaf.detach())
        return _StandIn.apply(self, start, length, *(leaves[place] for place in self._differentiable))

    def joined(self) -> Any:
        """The output for the whole micro-batch, once. Its gradient ends here."""
        leaves = self._leaves
        self._leaves = []
        if self._differentiable:
            anchor = torch.empty((), requires_grad=True)
            tensors = _Joined.apply(anchor, [leaves[place] for place in self._differentiable], self)
            for place, tensor in zip(self._differentiable, tensors, strict=True):
                leaves[place] = tensor
        if self._rearranged is not None:
            for place, dimension in enumerate(self._dimensions):
                if dimension is not None:
                    leaves[place] = self._rearranged(leaves[place], dimension)
        for place, logits in self._logits.items():
            leaves[place] = logits.joined_as(leaves[place])
        self._logits = {}
        assert self._tree is not None, "outputs are joined before there is one"
        return tree_unflatten(leaves, self._tree)

    def receive(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Take the gradients of the joined tensors; None for one that the loss does not depend on."""
        self._gradients = list(gradients)

    def gradients(self, start: int, length: int) -> list[Tensor | None]:
        """The gradients of the tensors of a segment."""
        if not self._gradients:  # the loss has none
            return [None] * len(self._differentiable)
        dimensions = [self._dimensions[place] for place in self._differentiable]
        return [
            gradient if gradient is None or dimension is None else gradient.narrow(dimension, start, length)
            for gradient, dimension in zip(self._gradients, dimensions, strict=True)
        ]

    def _require_equal_numbers(self, leaves: list[Any]) -> None:
        for leaf, first in zip(leaves, self._leaves, strict=True):
            if isinstance(leaf, (int, float)) and leaf != first:
                raise ValueError(
                    f"the model returns {first} for one segment and {leaf} for another, and only values for each token "
                    "can be joined to those of the whole sequence; let it return such, or drop --sequence-splits"
                )

    def _require_tokens(self, leaves: list[Any], segment_length: int) -> None:
        """A size that was that of the first segment by chance is found here, if a later one has another length."""
        for leaf, dimension in zip(leaves, self._dimensions, strict=True):
            if dimension is not None and leaf.shape[dimension] != segment_length:
                raise _no_values_of_tokens(leaf, segment_length)

    def _buffer(self, leaf: Any, dimension: int | None) -> Any:
        """Room for a leaf of all segments; one that is whole needs none."""
        if not isinstance(leaf, Tensor):
            return leaf
        if dimension is None or leaf.shape[dimension] == self._length:
            return leaf.detach()
        return leaf.new_empty([*leaf.shape[:dimension], self._length, *leaf.shape[dimension + 1 :]])


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
