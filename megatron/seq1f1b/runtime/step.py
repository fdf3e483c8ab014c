"""One step: a call of Megatron's `forward_backward_func`, normalised and checked, and its data by segments."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import _build_default_pg_collection
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_map_with_path

from ..model import Segment
from ..schedule import Placement, Shape


class SegmentIterator:
    """Replaces the data iterator of one model chunk during one step; `next()` returns the running segment.

    Batches are read once and in order, as a micro-batch number must mean the same batch on every stage, and kept until
    their last segment. `check(mask, where)` is called for every attention mask, booleans [..., s, s].
    """

    def __init__(self, batches: Iterator[Any], check: Callable[[torch.Tensor, str], None] | None = None) -> None:
        self._batches = batches
        self._check = check
        self._kept: dict[int, Any] = {}
        self._read = 0
        self.segment: Segment | None = None  # of the coming or the last `next()`
        self.latest: Any = None  # the whole batch of the segment that `next()` returned last

    def at(self, segment: Segment) -> "SegmentIterator":
        """Make `next()` return this segment."""
        self.segment = segment
        return self

    def __iter__(self) -> "SegmentIterator":
        return self

    def __next__(self) -> Any:
        segment = self.segment
        self._read_to(segment.microbatch + 1)
        batch = self._kept.pop(segment.microbatch) if segment.is_last else self._kept[segment.microbatch]
        self.latest = batch
        if segment.is_whole_sequence:
            self.latest = tree_map(lambda leaf: leaf, batch)  # Megatron cuts a batch in place for context parallelism
            return batch
        if segment.is_first:
            _require_sequences(batch, segment)
        return tree_map_with_path(lambda path, leaf: cut(leaf, segment, keystr(path)), batch)

    def read_ahead(self, num_microbatches: int) -> list[Any]:
        """The whole batches of a step that is about to begin."""
        self._read_to(num_microbatches)
        return [self._kept[microbatch] for microbatch in range(num_microbatches)]

    def _read_to(self, num_microbatches: int) -> None:
        while self._read < num_microbatches:
            batch = self._kept[self._read] = next(self._batches)
            for leaf in tree_leaves(batch) if self._check else ():
                square = (self.segment.sequence_length,) * 2
                if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool and leaf.shape[-2:] == square:
                    self._check(leaf, f"the attention mask in the batch of micro-batch {self._read}")
            self._read += 1


def _require_sequences(batch: Any, segment: Segment) -> None:
    """Raise ValueError for a batch with nothing to cut if it has integers [x, y] that look like tokens. Activations may
    have another layout, in a program that cuts them itself."""
    length = segment.sequence_length
    leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, torch.Tensor)]
    integers = [(name, leaf) for name, leaf in leaves if leaf.dim() == 2 and leaf.dtype in (torch.int32, torch.int64)]
    tokens = [f"{name} {list(leaf.shape)}" for name, leaf in integers if leaf.numel() >= length]
    if tokens and not any(length in leaf.shape[1:] for _, leaf in leaves):
        raise ValueError(
            f"no tensor of micro-batch {segment.microbatch} has sequences of {length} tokens to cut: "
            f"{', '.join(tokens)}; yield tensors [sequences, {length}, ...], or drop --sequence-splits"
        )


def cut(leaf: Any, segment: Segment, name: str = "") -> Any:
    """The part of a batch entry that belongs to `segment`.

    Every dimension as long as a sequence is narrowed, except for the first, which counts sequences. Positions where
    documents start (`cu_seqlens`) become positions in the segment. Anything else stays as it is.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if "cu_seqlens" in name:
        return (leaf - segment.start).clamp(0, segment.length)
    for dimension in range(1, leaf.dim()):
        if leaf.shape[dimension] == segment.sequence_length:
            leaf = leaf.narrow(dimension, segment.start, segment.length)
    if leaf.is_contiguous() or not leaf.is_pinned():
        return leaf.contiguous()
    # Pinned like the whole batch, else the host would wait for the copy to the GPU.
    return torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf)


@dataclass(kw_only=True)
class Step:
    """The arguments of one call, see megatron/core/pipeline_parallel/schedules.py, on one rank of a pipeline.

    `chunks` are the model chunks of this rank, `iterators` their data. `seq_length` is 0 if Megatron leaves it out
    because no message is sent. `Segmentation.cut_step` sets `segments[m][s]`, segment s of micro-batch m, and
    `batches`, the data of the chunks by segments. Raises ValueError for a call that our schedules cannot follow.
    """

    forward_step_func: Callable
    data_iterator: InitVar[Any]
    model: InitVar[torch.nn.Module | list[torch.nn.Module]]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int | None
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable | None = None
    p2p_communicator: Any = None
    pg_collection: InitVar[ProcessGroupCollection | None] = None
    force_all_reduce: bool = False
    style: InitVar[str] = "looped"

    segments: Sequence[Sequence[Segment]] = ()
    batches: Sequence[SegmentIterator | None] = ()

    def __post_init__(self, data_iterator: Any, model: Any, pg_collection: Any, style: str) -> None:
        self.chunks: list[torch.nn.Module] = model if isinstance(model, list) else [model]
        self.iterators: list[Any] = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        if len(self.iterators) != len(self.chunks):
            raise ValueError(
                f"{len(self.chunks)} model chunks need a data iterator each, but {len(self.iterators)} were given"
            )
        self.seq_length = self.seq_length or 0
        self.config: Any = get_model_config(self.chunks[0])
        if not hasattr(self.config, "calculate_per_token_loss"):
            self.config.calculate_per_token_loss = False  # Megatron reads it, but only a TransformerConfig has it
        if self.p2p_communicator is not None and pg_collection is None:
            raise ValueError("a p2p_communicator needs its pg_collection")
        is_known = type(self.p2p_communicator) in (type(None), P2PCommunicator)
        if not is_known or self.adjust_tensor_shapes_fn is not None or self.config.variable_seq_lengths:
            raise ValueError(
                "a p2p_communicator of its own kind, adjust_tensor_shapes_fn and variable_seq_lengths change the "
                "messages between stages, which our schedules fix in advance; run this model with Megatron's own "
                "schedule"
            )
        if self.config.num_microbatches_with_partial_activation_checkpoints is not None:
            raise ValueError(
                "num_microbatches_with_partial_activation_checkpoints counts whole micro-batches in flight, but our "
                "schedules hold segments; unset it, or run this model with Megatron's own schedule"
            )
        self.groups = pg_collection or _build_default_pg_collection()
        self.pipeline = self.groups.pp if self.p2p_communicator is None else self.p2p_communicator.pp_group
        refuse_waits(self.config, self.pipeline)
        self.rank: int = self.pipeline.rank()
        self.placement = Placement(self.pipeline.size(), len(self.chunks), style)

    @property
    def device(self) -> torch.device:
        return torch.device(torch.cuda.current_device())

    @cached_property
    def shape(self) -> Shape:
        return Shape.of(self.placement, [len(each) for each in self.segments])


def refuse_waits(config: Any, pipeline: dist.ProcessGroup) -> None:
    """Raise ValueError for settings that make the host wait for the whole GPU within a step: with NCCL a receive posted
    ahead occupies the GPU until its message arrives, which may depend on later actions of this rank."""
    if pipeline.size() == 1 or dist.get_backend(pipeline) != "nccl":
        return
    if getattr(config.timers, "_log_level", 0) > 1:
        name = "--timing-log-level 2"
    elif os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        name = "CUDA_LAUNCH_BLOCKING"
    else:
        return
    raise ValueError(
        f"{name} makes the host wait for a GPU that waits for messages, so the first step would not end; drop it, and "
        "take --pipeline-trace for the times of actions"
    )
