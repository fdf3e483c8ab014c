"""Patches with which Megatron builds, steps and saves model chunks whose weights and gradients are partitioned.

Tested in runtime/test_partitioned_state.py.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Parameter

from ...process.patches import PatchTable, wrapping
from .partitioned_state import PartitionedChunk, Share, is_empty, whole

_DDP = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"


def patches() -> PatchTable:
    """Patches with which Megatron builds and steps chunks with a partitioned state."""

    def gather(upstream: Callable, ddp: Any, group: Any, force_sync: bool) -> None:
        if not is_empty(group.buckets[0].param_data):
            upstream(ddp, group, force_sync)

    def reset(upstream: Callable, buffer: Any) -> None:
        if not is_empty(buffer.grad_data):
            upstream(buffer)

    def lend(_: Callable, ddp: Any, *args: Any, **options: Any) -> None:
        ddp.partitioned_state.lend_gradients()

    return (
        wrapping(f"{_DDP}.__init__", _init_partitioned, "keeps all weights and gradients"),
        wrapping(f"{_DDP}._start_bucket_group_param_sync", gather, "gathers after the optimizer's step"),
        wrapping(f"{_DDP}.finish_grad_sync", lend, "takes gradients to be whole"),
        wrapping(f"{_DDP}.zero_grad_buffer", _zero_shares, "leaves the shares of gradients"),
        wrapping(f"{_BUFFER}.reset", reset, "writes zeros to gradients that are not there"),
        wrapping(f"{_BUFFER}.scale_gradients", _scale_shares, "scales gradients that are not there"),
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


def _init_partitioned(init: Callable, ddp: Any, *args: Any, **options: Any) -> None:
    init(ddp, *args, **options)
    if not ddp.ddp_config.use_distributed_optimizer:
        raise ValueError("partition_state needs DistributedDataParallelConfig(use_distributed_optimizer=True)")
    # Megatron's training loop holds the wrapper, its checkpoint code the model inside.
    ddp.partitioned_state = unwrap_model(ddp).partitioned_state = PartitionedChunk(ddp)


def _zero_shares(zero: Callable, ddp: Any) -> None:
    ddp.partitioned_state.finish_reduction()
    ddp.partitioned_state.take_back_gradients()  # of a step that is repeated
    zero(ddp)
    for share in ddp.partitioned_state.shares:
        share.gradients.zero_()


def _scale_shares(scale: Callable, buffer: Any, factor: Any) -> None:
    if not is_empty(buffer.grad_data):
        scale(buffer, factor)
        return
    for bucket in buffer.buckets:
        bucket.share.scale_gradients(factor)


def _take_gradients(upstream: Callable, optimizer: Any) -> None:
    """The optimizer's parameters are parts of the shares."""
    if not _lacks(optimizer, "grad_data"):
        upstream(optimizer)
        return
    if optimizer.config.use_precision_aware_optimizer or optimizer.config.optimizer_cpu_offload:
        raise ValueError(
            "partition_state does not work with use_precision_aware_optimizer and optimizer_cpu_offload; drop them"
        )
    for buffer in optimizer.buffers:
        for bucket in buffer.buckets:
            bucket.share.take_back_gradients()
    for part in _parts_of_parameters(optimizer):
        share = part.share
        part.in_optimizer.grad = share.gradients[part.place].float()
        if part.in_model.dtype is torch.float32 and is_empty(share.bucket.param_data):
            part.in_optimizer.data = share.weights[part.place]  # the optimizer has no copy of its own


def _keep_weights(upstream: Callable, optimizer: Any) -> None:
    if not _lacks(optimizer, "param_data"):
        upstream(optimizer)
        return
    for part in _parts_of_parameters(optimizer):
        part.share.weights[part.place].copy_(part.in_optimizer)


def _lacks(optimizer: Any, data: str) -> bool:
    """Whether the weights or gradients of the optimizer are empty; in groups of one rank they never are."""
    return not optimizer.is_stub_optimizer and any(is_empty(getattr(buffer, data)) for buffer in optimizer.buffers)


class _Part(NamedTuple):
    """The part of a parameter that this rank's optimizer steps."""

    in_model: Parameter  # whole
    in_optimizer: Tensor  # the part alone; of 16-bit weights, a copy in fp32
    share: Share
    place: slice  # of the part in the share


def _parts_of_parameters(optimizer: Any) -> Iterator[_Part]:
    of_model = chain(*optimizer.model_float16_groups, *optimizer.model_fp32_groups)
    of_optimizer = chain(*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups)
    for in_model, in_optimizer in zip(of_model, of_optimizer, strict=True):
        buffer, _, bucket = optimizer.model_param_gbuf_map[in_model]
        place = optimizer._get_model_param_range_map(in_model)["gbuf_local"]
        yield _Part(
            in_model=in_model,
            in_optimizer=in_optimizer,
            share=optimizer.buffers[buffer].buckets[bucket].share,
            place=slice(place.start, place.end),
        )


def _with_weights(
    generate: Callable, args: Any, model: Sequence[torch.nn.Module], *rest: Any, **more: Any
) -> dict[str, Any]:
    """Weights are saved from copies on the host, made chunk by chunk, and loaded in place."""
    chunks = [unwrap_model(chunk) for chunk in model]
    options = more.get("optim_sd_kwargs") or {}
    if options.get("is_loading", False):
        for chunk in chunks:
            chunk.partitioned_state.lend()
        return generate(args, model, *rest, **more)
    state = generate(args, model, *rest, **more)
    for number, chunk in enumerate(chunks):
        name = f"model{number}" if len(chunks) > 1 else "model"
        with whole([chunk]):
            for entry in nested_values(state[name]):
                if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
                    entry.data = entry.data.detach().to("cpu", copy=True)
    return state
