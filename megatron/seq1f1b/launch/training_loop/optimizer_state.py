"""Megatron's checkpoints of the distributed optimizer, with gradient buffers of several buckets.

A fully reshardable checkpoint has the optimizer's tensors by parameter. To save them, Megatron joins the buckets of a
buffer without the padding at their ends, then finds each parameter by an offset that counts this padding. Everything
behind the first padded bucket is displaced, the fp32 weights among it, and nothing fails. Megatron 0.20 subtracts the
padding (its pull request 5077). In the other format, by buckets, the padding before a tied embedding may reach beyond
the end of its bucket, which PyTorch refuses to save (pull request 5898).

Tested in functional_tests/test_optimizer_state.py by test_a_checkpoint_has_the_tensors_of_the_optimizer.
"""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import accumulate, chain
from math import sqrt
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor
from torch.nn import Parameter

from ...process.megatron_versions import displaces_padded_buckets
from ...process.patches import PatchTable, wrapping

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
# The optimizer's weights and the model's differ by rounding: in 4 bits by a tenth, in fp16 those near zero by 1e-7.
# Displaced ones differ by about their own size.
_LARGEST_SHARE = 0.5
_LARGEST_NEAR_ZERO = 1e-6


def repairs(version: str) -> PatchTable:
    """The patches with which Megatron of this version saves the state of the optimizer as it was meant."""
    by_bucket = f"{_OPTIMIZER}.sharded_param_state_dp_reshardable"
    by_parameter = f"{_OPTIMIZER}.sharded_param_state_fully_reshardable"
    loading = f"{_OPTIMIZER}.load_parameter_state_from_fully_reshardable"
    rows = [
        wrapping(by_bucket, _within_buckets, "pads beyond the end of a bucket"),
        wrapping(loading, _unless_displaced, "takes other weights than those of the model"),
    ]
    if displaces_padded_buckets(version):
        rows.append(wrapping(by_parameter, _by_offsets_without_padding, "displaces what is behind a padded bucket"))
    return tuple(rows)


def _by_offsets_without_padding(upstream: Callable, optimizer: Any, *args: Any, **options: Any) -> Any:
    with ExitStack() as undo:
        for buffer in optimizer.buffers:
            undo.callback(setattr, buffer, "param_index_map", buffer.param_index_map)
            buffer.param_index_map = offsets_without_padding(buffer)
        return upstream(optimizer, *args, **options)


def offsets_without_padding(buffer: Any) -> dict[Parameter, tuple[int, int, int]]:
    """Start and end of each parameter in the joined buckets of a buffer of Megatron, and its bucket."""
    paddings = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = list(accumulate(paddings, initial=0))
    return {
        parameter: (start - before[bucket], end - before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def _within_buckets(upstream: Callable, *args: Any, **options: Any) -> Any:
    state = upstream(*args, **options)
    for part in nested_values(state):
        if isinstance(part, ShardedTensor):
            (start,) = part.global_offset
            (size,) = part.local_shape
            (end,) = part.global_shape
            if start + size > end:
                part.data = part.data[: end - start]
                part.local_shape = (end - start,)
    return state


def _unless_displaced(upstream: Callable, optimizer: Any, state: dict[int, dict[str, Tensor]]) -> None:
    """Raise ValueError if this rank's parts of parameters differ from the model's behind the first bucket of a buffer
    and equal them in it, where none is displaced. If those differ, too, the program loads its model later."""
    parameters = chain.from_iterable(buffer.param_index_map for buffer in optimizer.buffers)
    saved = {parameter: state[number]["param"] for number, parameter in enumerate(parameters)}

    def differs(parameter: Parameter) -> bool:
        own = optimizer._get_model_param_range_map(parameter)["param"]
        weights = parameter.detach().float().flatten()[own.start : own.end]
        difference = saved[parameter].flatten()[own.start : own.end].to(weights.device) - weights
        return _size(difference) > _LARGEST_SHARE * _size(weights) + _LARGEST_NEAR_ZERO

    for buffer in optimizer.buffers:
        own = [parameter for parameter in buffer.param_index_map if parameter in optimizer.model_param_gbuf_map]
        # Not vectors: those of norms are much alike in all models.
        places = buffer.param_index_map
        in_first = [parameter for parameter in own if places[parameter][2] == 0 and parameter.dim() > 1]
        if any(map(differs, own)) and in_first and not any(map(differs, in_first)):
            raise ValueError(
                "the checkpoint's optimizer has other weights than its model: without megatron.seq1f1b, Megatron "
                "before 0.20 mixes parameters up when it saves several gradient buckets with "
                "--dist-ckpt-optim-fully-reshardable; add --no-load-optim to go on from the weights of the model, "
                "which are right, or load an earlier checkpoint"
            )
    upstream(optimizer, state)


def _size(values: Tensor) -> float:
    """The root of the mean square."""
    return values.norm().item() / sqrt(len(values))
