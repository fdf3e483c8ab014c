"""Weights and gradients of a model chunk that are whole only while it runs; otherwise data-parallel ranks keep shares.

As in layered gradient accumulation with modular pipeline parallelism (arXiv 2106.02679), the state moves once for all
consecutive micro-batches of a chunk: weights are there from GATHER to RELEASE of the lowered schedule, of two chunks at
most, gradients from the first backward to REDUCE.

Buffers, collectives and optimizer are Megatron's. The storages of its buffers are emptied and filled again, so that
parameters, and the views that autograd and Megatron hold, stay the same objects.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .chunk_sync import ChunkSync


class _Lent(NamedTuple):
    """A whole gradient that a parameter has until the optimizer takes it, and the `main_grad` that it replaces."""

    whole: Tensor
    main_grad: Tensor  # a view of the bucket


class Share:
    """This rank's part of a bucket of Megatron: one of as many equal parts as its group has ranks."""

    def __init__(self, bucket: Any, rank: int, num_ranks: int) -> None:
        self.bucket = bucket
        size = bucket.grad_data.numel() // num_ranks
        self._start = rank * size
        self._end = (rank + 1) * size
        # The share's place in Megatron's buffers, and its own memory.
        self.weights_in_bucket = bucket.param_data[self._start : self._end]
        self.gradients_in_bucket = bucket.grad_data[self._start : self._end]
        self.weights = self.weights_in_bucket.clone()
        self.gradients = self.gradients_in_bucket.clone()
        self._lent: dict[Any, _Lent] = {}  # by parameter

    def lend_gradients(self) -> None:
        """Give a whole gradient, the share and zeros, to parameters with gradients that are also summed over
        tensor-parallel ranks, as those of vectors, or over the first and last stage."""
        marks = ("sequence_parallel", "average_gradients_across_tp_domain", "shared_embedding")
        for parameter in self.bucket.params_list:
            is_marked = any(getattr(parameter, mark, False) for mark in marks)
            if parameter.dim() != 1 and not is_marked:
                continue
            whole = self.gradients.new_zeros(parameter.shape)
            inside, mine = self._overlap(parameter)
            whole.view(-1)[inside] = self.gradients[mine]
            self._lent[parameter] = _Lent(whole, main_grad=parameter.main_grad)
            parameter.main_grad = whole

    def take_back_gradients(self) -> None:
        """Keep the share of the summed gradients."""
        for parameter, lent in self._lent.items():
            inside, mine = self._overlap(parameter)
            self.gradients[mine] = lent.whole.view(-1)[inside]
            parameter.main_grad = lent.main_grad
        self._lent.clear()

    def scale_gradients(self, factor: Any) -> None:
        """Multiply the gradients of the share, and those that it has lent, by a number or a tensor of one."""
        self.gradients *= factor
        for lent in self._lent.values():
            lent.whole.mul_(factor)

    def _overlap(self, parameter: Parameter) -> tuple[slice, slice]:
        """The elements of the parameter in the share: their places in the parameter, and in the share."""
        first, last = self.bucket.param_to_index[parameter]
        start = max(first, self._start)
        end = max(start, min(last, self._end))
        return slice(start - first, end - first), slice(start - self._start, end - self._start)


class PartitionedChunk(ChunkSync):
    """The weights and gradients of a model chunk in Megatron's DistributedDataParallel: whole, or shares of them. In a
    step it gathers, reduces and releases them."""

    makes_gradients = True

    def __init__(self, ddp: Any) -> None:
        super().__init__()
        self._states: list[PartitionedChunk] = []  # of all chunks of this rank
        self._overlaps_reduction = ddp.ddp_config.overlap_grad_reduce
        self._groups: list[Any] = []
        self._groups_alone: list[Any] = []  # of parameters that no other rank has
        self.shares: list[Share] = []
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
            rank = group.intra_distributed_optimizer_instance_rank
            num_ranks = group.intra_distributed_optimizer_instance_size
            if num_ranks == 1:
                self._groups_alone.append(group)
                continue
            self._groups.append(group)
            for bucket in group.buckets:
                bucket.share = Share(bucket, rank, num_ranks)
                self.shares.append(bucket.share)
        all_buffers = (*ddp.buffers, *ddp.expert_parallel_buffers)
        buffers = [buffer for buffer in all_buffers if buffer.data_parallel_world_size > 1]
        self._weights = [buffer.param_data for buffer in buffers]
        self._gradients = [buffer.grad_data for buffer in buffers]
        self._is_lent = True  # all weights are whole and writable
        self._is_reducing = False
        _empty(self._gradients)

    def begin(self, chunk: Any, chunks: Sequence[Any]) -> "PartitionedChunk":
        """Begin a step of `chunk`, one of a rank's `chunks`, perhaps not the first for this step of the optimizer."""
        self._no_sync.enter_context(chunk.no_sync())  # in which Megatron's hooks never reduce
        self._states = [chunk.partitioned_state for chunk in chunks]
        self.finish_reduction()
        self.take_back_gradients()
        self.release()
        return self

    def gather(self) -> None:
        """Start to gather the weights; with --overlap-param-gather that runs beside compute."""
        if not any(map(is_empty, self._weights)):  # never empty if no other rank has the same parameters
            return
        _fill(self._weights)
        for share in self.shares:
            share.weights_in_bucket.copy_(share.weights)
        for group in self._groups:
            group.start_param_sync()

    def before_forward(self) -> None:
        """Wait for the weights."""
        for group in self._groups:
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def release(self) -> None:
        """Keep the share of the weights."""
        self.before_forward()
        if self._is_lent:
            for share in self.shares:
                share.weights.copy_(share.weights_in_bucket)
            self._is_lent = False
        _empty(self._weights)

    def lend(self) -> None:
        """Gather the weights for code that writes to them between steps."""
        self.gather()
        self.before_forward()
        self._is_lent = True

    def before_backward(self) -> None:
        self.before_forward()
        if any(map(is_empty, self._gradients)):
            have_gradients = [not any(map(is_empty, state._gradients)) for state in self._states]
            if sum(have_gradients) > 1:  # one may still be waiting for its REDUCE
                for state in self._states:
                    state.finish_reduction()
            _fill(self._gradients)
            for gradients in self._gradients:
                gradients.zero_()

    def reduce(self) -> None:
        """Start to reduce the gradients; with --overlap-grad-reduce that runs beside compute."""
        for state in self._states:
            state.finish_reduction()
        self._is_reducing = True
        if not self._overlaps_reduction:
            self.finish_reduction()
            return
        for group in self._groups:
            group.grad_reduce_finished = False  # after an earlier call Megatron would not wait again
            group.start_grad_sync()

    def finish_reduction(self) -> None:
        """Add the reduced gradients to the share, which may hold those of earlier calls."""
        if not self._is_reducing:
            return
        for group in self._groups:
            group.finish_grad_sync()
        for share in self.shares:
            share.gradients += share.gradients_in_bucket
        _empty(self._gradients)
        self._is_reducing = False

    def lend_gradients(self) -> None:
        """End the reductions of a step of the optimizer, and lend whole gradients until it takes them."""
        self.finish_reduction()
        for group in self._groups_alone:
            group.finish_grad_sync()  # scales all gradients, also those of earlier calls
        for share in self.shares:
            share.lend_gradients()

    def take_back_gradients(self) -> None:
        """Undo `lend_gradients`, also if no optimizer has stepped, or one without parameters on this rank."""
        for share in self.shares:
            share.take_back_gradients()


def is_partitioned(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether Megatron built these model chunks under the patches of partition_patches.py."""
    return hasattr(chunks[0], "partitioned_state")


@contextmanager
def whole(chunks: Iterable[Any]) -> Iterator[None]:
    """Inside, all weights of these model chunks are whole, to read and write."""
    states: list[PartitionedChunk] = [chunk.partitioned_state for chunk in chunks if is_partitioned([chunk])]
    for state in states:
        state.lend()
    try:
        yield
    finally:
        for state in states:
            state.release()


def is_empty(tensor: Tensor) -> bool:
    """Whether the storage of one of Megatron's buffers is freed for now."""
    return tensor.untyped_storage().nbytes() == 0


def _empty(buffers: Iterable[Tensor]) -> None:
    """Free the storages of Megatron's buffers, each of one tensor, while views of them live on."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)


def _fill(buffers: Iterable[Tensor]) -> None:
    """Allocate the storages again; their values are undefined."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(buffer.nbytes)
