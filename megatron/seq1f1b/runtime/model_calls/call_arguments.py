"""The arguments of a call of the model, cut into segments."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ...model import Segment
from .argument_gradients import ArgumentGradients

# Masks and packed formats, which the attention of segments does without: it hides later tokens and other documents.
_OF_ATTENTION = "attention_mask", "packed_seq_params"


class Arguments(NamedTuple):
    """The arguments of a call of the model."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    names: tuple[str, ...]  # of the positional ones

    def by_name(self) -> dict[str, Any]:
        return dict(zip(self.names, self.positional, strict=True)) | self.named

    def embeddings(self) -> Tensor | None:
        """The embeddings [s, b, h] of a program that computes them by itself, else None."""
        embeddings = self.by_name().get("decoder_input")
        return embeddings if isinstance(embeddings, Tensor) else None

    def with_embeddings(self, embeddings: Tensor) -> "Arguments":
        """These arguments with other embeddings."""
        own = self.embeddings()
        positional = tuple(embeddings if value is own else value for value in self.positional)
        named = {name: embeddings if value is own else value for name, value in self.named.items()}
        return Arguments(positional, named, self.names)


def gather_embeddings(arguments: Arguments, group: dist.ProcessGroup) -> Arguments:
    """Arguments whose embeddings [s, b, h] are whole: with sequence parallelism a program gives every tensor-parallel
    rank its rows of the whole sequence, and the model needs those of a segment. A collective of the group."""
    own = arguments.embeddings()
    if own is None:
        return arguments
    whole = gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=False, group=group)
    return arguments.with_embeddings(whole)


class CutArguments:
    """The arguments of one call, for `num_sequences` (b) sequences of `length` (s) tokens.

    A tensor is cut along every dimension but the first that has s elements, or along the first if it is [s, b, ...];
    all else passes through. `part(tensor, dimension, segment)` is what a segment has of a tensor. With
    `follows_segments` the attention layers know segments and documents, and get no masks. With `sequence_parallel`,
    a tensor-parallel group, its ranks divide the embeddings of a segment. `gradients` are those of the tensors that the
    program computed from its own parameters; None if there are none.
    """

    def __init__(
        self,
        arguments: Arguments,
        num_sequences: int,
        length: int,
        part: Callable[[Tensor, int, Segment], Tensor],
        follows_segments: bool,
        sequence_parallel: dist.ProcessGroup | None = None,
    ) -> None:
        self._part = part
        self._sequence_parallel = sequence_parallel
        self._whole = _without_masks(arguments) if follows_segments else arguments
        self._leaves, self._tree = _flattened(self._whole)
        self._divided: list[int] = []  # the places of what tensor-parallel ranks divide among each other
        if sequence_parallel is not None:
            embeddings = arguments.embeddings()
            if embeddings is not None:
                self._divided = [place for place, leaf in enumerate(self._leaves) if leaf is embeddings]
        self.gradients = ArgumentGradients.of(self._leaves)
        if self.gradients is not None:
            self._leaves = self.gradients.with_ends(self._leaves)
            self._whole = self._with(self._leaves)
        self._cuts: list[tuple[int, Sequence[int]]] = []  # the places of what is cut, and along which dimensions
        for place, leaf in enumerate(self._leaves):
            dimensions = token_dimensions(leaf, num_sequences, length)
            if dimensions:
                self._cuts.append((place, dimensions))

    def of(self, segment: Segment) -> Arguments:
        """The arguments for one segment."""
        if not self._cuts:
            return self._whole
        is_whole = self._part is narrowed and segment.is_whole_sequence
        if is_whole and not self._divided:
            return self._whole
        leaves = list(self._leaves)
        if not is_whole:
            for place, dimensions in self._cuts:
                for dimension in dimensions:
                    leaves[place] = self._part(leaves[place], dimension, segment)
                leaves[place] = leaves[place].contiguous()
        for place in self._divided:
            leaves[place] = scatter_to_sequence_parallel_region(leaves[place], group=self._sequence_parallel)
        return self._with(leaves)

    def _with(self, leaves: list[Any]) -> Arguments:
        positional, named = tree_unflatten(leaves, self._tree)
        return Arguments(positional, named, self._whole.names)


def _without_masks(arguments: Arguments) -> Arguments:
    """The arguments with None in place of those that segments do without."""
    pairs = zip(arguments.names, arguments.positional, strict=True)
    positional = [None if name in _OF_ATTENTION else value for name, value in pairs]
    named = {name: None if name in _OF_ATTENTION else value for name, value in arguments.named.items()}
    return Arguments(tuple(positional), named, arguments.names)


def _flattened(arguments: Arguments) -> tuple[list[Any], TreeSpec]:
    """The leaves of the arguments, and the structure around them; what holds no tensors is a leaf as a whole."""
    # PyTorch would call `is_leaf` for every argument of every call, and few programs pass structures.
    is_leaf = None
    for argument in (*arguments.positional, *arguments.named.values()):
        if argument.__class__ in (dict, list):
            is_leaf = holds_no_tensors
    return tree_flatten((arguments.positional, arguments.named), is_leaf)


def holds_no_tensors(argument: Any) -> bool:
    """Whether an argument is handed on itself: a model may fill in a dict that its program reads after the call."""
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(argument))


def token_dimensions(leaf: Any, num_sequences: int, length: int) -> Sequence[int]:
    """The dimensions of an argument that count the `length` tokens of a sequence; empty if it has none."""
    if not isinstance(leaf, Tensor) or leaf.is_nested:
        return ()
    if num_sequences != length and leaf.shape[:2] == (length, num_sequences):
        return (0,)  # also of embeddings [s, b, h] as wide as the sequence is long
    return [dimension for dimension in range(1, leaf.dim()) if leaf.shape[dimension] == length]


def narrowed(leaf: Tensor, dimension: int, segment: Segment) -> Tensor:
    """The tokens of a segment."""
    return leaf.narrow(dimension, segment.start, segment.length)


def size_of(arguments: Arguments) -> tuple[int, int] | None:
    """The number of sequences and of tokens in each that a call is for: those of its `input_ids`, else of its packed
    format, of its embeddings [s, b, h], or of its first tensor [b, s, ...] but a mask; None for a call without data."""
    named = arguments.by_name()
    packed = named.get("packed_seq_params")
    tokens = named.get("input_ids")
    if isinstance(tokens, Tensor) and not tokens.is_nested and tokens.dim() == 2:
        return tokens.shape[0], tokens.shape[1]
    if isinstance(packed, PackedSeqParams):
        return 1, bounds_of(packed)[-1]
    embedded = arguments.embeddings()
    if embedded is not None and embedded.dim() == 3:
        return embedded.shape[1], embedded.shape[0]
    for leaf in tree_flatten([value for name, value in named.items() if name not in _OF_ATTENTION])[0]:
        if isinstance(leaf, Tensor) and not leaf.is_nested and leaf.dim() >= 2:
            return leaf.shape[0], leaf.shape[1]
    return None


def require_size(arguments: Arguments, num_sequences: int, length: int, microbatch: int) -> None:
    """Raise ValueError for a call on the first stage with data of another size than the step is cut for."""
    size = size_of(arguments)
    if size is None or size in ((num_sequences, length), (length, num_sequences)):
        return
    raise ValueError(
        f"the forward step of micro-batch {microbatch} calls its model with {size[0]} sequences of {size[1]} tokens, "
        f"but segments are cut from {num_sequences} of {length}, as micro_batch_size and seq_length say; correct "
        "these, or set variable_seq_lengths in the model's configuration"
    )


def bounds_of(packed: PackedSeqParams) -> list[int]:
    """Where the documents of a pack start, padded if they are, and where the last one ends. Waits for the GPU."""
    given = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    bounds = torch.as_tensor(given).flatten().tolist()
    # Entries behind the last end have no meaning: some data sets fill up with -1, others repeat the end.
    meant = bounds[:1]
    for bound in bounds[1:]:
        if bound < meant[-1]:
            break
        meant.append(bound)
    return meant
