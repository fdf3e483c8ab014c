"""Weights and gradients of a model chunk that are whole only while it runs; otherwise data-parallel ranks keep shares.

As in layered gradient accumulation with modular pipeline parallelism (arXiv 2106.02679), the state moves once for all
consecutive micro-batches of a chunk: weights are there from GATHER to RELEASE of the lowered schedule, of two chunks at
most, gradients from the first backward to REDUCE.

Buffers, collectives and optimizer are Megatron's. The storages of its buffers are emptied and filled again, so that
parameters, and the views that autograd and Megatron hold, stay the same objects.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Parameter

from ..process.patches import PatchTable, wrapping
from .gradient_sync import ChunkSync

_DDP = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"


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
        # Whole gradients of some parameters, and the views that these replace.
        self.lent: dict[Any, tuple[Tensor, Tensor]] = {}

    def lend_gradients(self) -> None:
        """Give a whole gradient, the share and zeros, to parameters with gradients that are also summed over
        tensor-parallel ranks, as those of vectors, or over the first and last stage."""
        marks = ("sequence_parallel", "average_gradients_across_tp_domain", "shared_embedding")
        for parameter in self.bucket.params_list:
            if parameter.dim() != 1 and not any(getattr(parameter, mark, False) for mark in marks):
                continue
            whole = self.gradients.new_zeros(parameter.shape)
            inside, mine = self._overlap(parameter)
            whole.view(-1)[inside] = self.gradients[mine]
            self.lent[parameter] = whole, parameter.main_grad
            parameter.main_grad = whole

    def take_back_gradients(self) -> None:
        """Keep the share of the summed gradients."""
        for parameter, (whole, view) in self.lent.items():
            inside, mine = self._overlap(parameter)
            self.gradients[mine] = whole.view(-1)[inside]
            parameter.main_grad = view
        self.lent.clear()

    def _overlap(self, parameter: Parameter) -> tuple[slice, slice]:
        """The elements of the parameter in the share: their places in the parameter, and in the share."""
        first, last = self.bucket.param_to_index[parameter]
        start = max(first, self._start)
        end = max(start, min(last, self._end))
        return slice(start - first, end - first), slice(start - self._start, end - self._start)


class PartitionedChunk(ChunkSync):
    """The weights and gradients of a model chunk in Megatron's DistributedDataParallel: whole, or shares of them. In a
    step it gathers, reduces and releases them."""

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
        buffers = [each for each in (*ddp.buffers, *ddp.expert_parallel_buffers) if each.data_parallel_world_size > 1]
        self._weights = [buffer.param_data for buffer in buffers]
        self._gradients = [buffer.grad_data for buffer in buffers]
        self._is_lent = True  # all weights are whole and writable
        self._is_reducing = False
        _empty(self._gradients)

    def begin(self, chunk: Any, chunks: Sequence[Any]) -> "PartitionedChunk":
        """Begin a step of `chunk`, one of a rank's `chunks`, perhaps not the first for this step of the optimizer."""
        self._no_sync.enter_context(chunk.no_sync())  # in which Megatron's hooks never reduce
        self._states = [each.partitioned_state for each in chunks]
        self.finish_reduction()
        self.take_back_gradients()
        self.release()
        return self

    def gather(self) -> None:
        """Start to gather the weights; with --overlap-param-gather that runs beside compute."""
        if not any(map(_is_empty, self._weights)):  # never empty if no other rank has the same parameters
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
        if any(map(_is_empty, self._gradients)):
            have_gradients = [not any(map(_is_empty, each._gradients)) for each in self._states]
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


def _is_empty(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == 0


def _empty(buffers: Iterable[Tensor]) -> None:
    """Free the storages of Megatron's buffers, each of one tensor, while views of them live on."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)


def _fill(buffers: Iterable[Tensor]) -> None:
    for buffer in buffers:
        buffer.untyped_storage().resize_(buffer.nbytes)


def is_partitioned(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether Megatron built these model chunks under `patches`."""
    return hasattr(chunks[0], "partitioned_state")


def patches() -> PatchTable:
    """Patches with which Megatron builds and steps chunks with a partitioned state."""

    def gather(upstream: Callable, ddp: Any, group: Any, force_sync: bool) -> None:
        if not _is_empty(group.buckets[0].param_data):
            upstream(ddp, group, force_sync)

    def reset(upstream: Callable, buffer: Any) -> None:
        if not _is_empty(buffer.grad_data):
            upstream(buffer)

    def lend(_: Callable, ddp: Any, *args: Any, **options: Any) -> None:
        ddp.partitioned_state.lend_gradients()

    return (
        wrapping(f"{_DDP}.__init__", _partitioned, "keeps all weights and gradients"),
        wrapping(f"{_DDP}._start_bucket_group_param_sync", gather, "gathers after the optimizer's step"),
        wrapping(f"{_DDP}.finish_grad_sync", lend, "takes gradients to be whole"),
        wrapping(f"{_DDP}.zero_grad_buffer", _cleared, "leaves the shares of gradients"),
        wrapping(f"{_BUFFER}.reset", reset, "writes zeros to gradients that are not there"),
        wrapping(f"{_BUFFER}.scale_gradients", _scaled, "scales gradients that are not there"),
        wrapping(f"{_OPTIMIZER}._copy_model_grads_to_main_grads", _take_gradients, "reads whole gradients"),
        wrapping(f"{_OPTIMIZER}._copy_main_params_to_model_params", _keep_weights, "writes to whole weights"),
    )


def patches_of_training_loop() -> PatchTable:
    """Patches with which Megatron's training loop releases the weights that it built, and saves them."""

    def set_up(upstream: Callable, *args: Any, **options: Any) -> Any:
        chunks, *others = upstream(*args, **options)
        for chunk in chunks:
            chunk.partitioned_state.release()
        return chunks, *others

    return (
        wrapping("megatron.training.training.setup_model_and_optimizer", set_up, "leaves whole weights"),
        wrapping("megatron.training.checkpointing.generate_state_dict", _with_weights, "takes weights to be whole"),
    )


@contextmanager
def whole(chunks: Iterable[Any]) -> Iterator[None]:
    """Inside, all weights of these model chunks are whole, to read and write."""
    states: list[PartitionedChunk] = [
        chunk.partitioned_state for chunk in chunks if hasattr(chunk, "partitioned_state")
    ]
    for state in states:
        state.lend()
    try:
        yield
    finally:
        for state in states:
            state.release()


def _partitioned(init: Callable, ddp: Any, *args: Any, **options: Any) -> None:
    init(ddp, *args, **options)
    if not ddp.ddp_config.use_distributed_optimizer:
        raise ValueError("partition_state needs DistributedDataParallelConfig(use_distributed_optimizer=True)")
    # Megatron's training loop holds the wrapper, its checkpoint code the model inside.
    ddp.partitioned_state = unwrap_model(ddp).partitioned_state = PartitionedChunk(ddp)


def _cleared(zero: Callable, ddp: Any) -> None:
    ddp.partitioned_state.finish_reduction()
    ddp.partitioned_state.take_back_gradients()  # of a step that is repeated
    zero(ddp)
    for share in ddp.partitioned_state.shares:
        share.gradients.zero_()


def _scaled(scale: Callable, buffer: Any, factor: Any) -> None:
    if not _is_empty(buffer.grad_data):
        scale(buffer, factor)
        return
    for bucket in buffer.buckets:
        for gradients in (bucket.share.gradients, *(whole for whole, _ in bucket.share.lent.values())):
            gradients *= factor


def _take_gradients(upstream: Callable, optimizer: Any) -> None:
    """The optimizer's parameters are parts of the shares."""
    if not _lacks(optimizer, "grad_data"):
        upstream(optimizer)
        return
    if optimizer.config.use_precision_aware_optimizer or optimizer.config.optimizer_cpu_offload:
        raise ValueError(
            "partition_state does not work with use_precision_aware_optimizer and optimizer_cpu_offload; drop them"
        )
    for bucket in chain.from_iterable(buffer.buckets for buffer in optimizer.buffers):
        bucket.share.take_back_gradients()
    for model, main, share, place in _parameters(optimizer):
        main.grad = share.gradients[place].float()
        if model.dtype is torch.float32 and _is_empty(share.bucket.param_data):
            main.data = share.weights[place]  # the optimizer has no copy of its own


def _keep_weights(upstream: Callable, optimizer: Any) -> None:
    if not _lacks(optimizer, "param_data"):
        upstream(optimizer)
        return
    for _, main, share, place in _parameters(optimizer):
        share.weights[place].copy_(main)


def _lacks(optimizer: Any, data: str) -> bool:
    """Whether the weights or gradients of the optimizer are empty; in groups of one rank they never are."""
    return not optimizer.is_stub_optimizer and any(_is_empty(getattr(buffer, data)) for buffer in optimizer.buffers)


def _parameters(optimizer: Any) -> Iterator[tuple[Parameter, Tensor, Share, slice]]:
    """Each parameter of the model, the optimizer's part of it, and the place of that part in a share."""
    models = chain(*optimizer.model_float16_groups, *optimizer.model_fp32_groups)
    mains = chain(*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups)
    for model, main in zip(models, mains, strict=True):
        buffer, _, bucket = optimizer.model_param_gbuf_map[model]
        place = optimizer._get_model_param_range_map(model)["gbuf_local"]
        yield model, main, optimizer.buffers[buffer].buckets[bucket].share, slice(place.start, place.end)


def _with_weights(
    generate: Callable, args: Any, model: Sequence[torch.nn.Module], *rest: Any, **more: Any
) -> dict[str, Any]:
    """Weights are saved from copies on the host, made chunk by chunk, and loaded in place."""
    chunks = [*map(unwrap_model, model)]
    if (more.get("optim_sd_kwargs") or {}).get("is_loading", False):
        for chunk in chunks:
            chunk.partitioned_state.lend()
        return generate(args, model, *rest, **more)
    found = generate(args, model, *rest, **more)
    for number, chunk in enumerate(chunks):
        with whole([chunk]):
            for each in nested_values(found[f"model{number}" if len(chunks) > 1 else "model"]):
                if isinstance(each, (ShardedTensor, ShardedTensorFactory)):
                    each.data = each.data.detach().to("cpu", copy=True)
    return found
