"""What Megatron has to be spared on tensors without values: one table, with the reasons."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode

from ..model.kernels import AttentionRule, KernelChoice
from ..model.kernels.cuda import CudaFlash
from ..patches import Patch, PatchTable, Scope

_SCALAR = torch.ops.aten._local_scalar_dense.default

# Collectives that FakeTensorMode does not take; they write into tensors that are there and return what waits for them.
_COALESCED = (
    torch.ops.c10d.allgather_into_tensor_coalesced_.default,
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default,
)


def run_without_values(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors. A number that is read from one is not a number, a truth value is False.

    So an optimizer finds no overflow and clips nothing. Whole numbers stay unknown, since sizes could follow from them.
    """
    if function is _SCALAR and args[0].dtype.is_floating_point:
        return math.nan
    if function is _SCALAR and args[0].dtype is torch.bool:
        return False
    if function in _COALESCED:
        return FakeWork().boxed()
    return function(*args, **kwargs)


def fake_mode() -> FakeTensorMode:
    """Tensors that are made inside have shapes and storages, but neither values nor memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def spared(device: str) -> PatchTable:
    """What is bound while a stage runs on fake tensors; kernels are those of a GPU unless `device` is the CPU."""
    return PatchTable(Scope.STEP, _FOR_FAKES + (() if device == "cpu" else _AS_ON_A_GPU))


def _apply(module: torch.nn.Module, function: Callable, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` with new parameters in the places of those that change."""
    for child in module.children() if recurse else ():
        _apply(child, function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            changed = function(parameter)
        if changed is not parameter:
            new = torch.nn.Parameter(changed, parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _own_object_everywhere(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _own_objects(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    """They stay as they are."""


def _fake_group(new_group: Callable) -> Callable:
    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **(kwargs | {"backend": "fake", "pg_options": None}))

    return new_fake_group


def _no_norm(*args: Any, **kwargs: Any) -> float:
    return math.nan


def _own_answer(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def _always(*args: Any) -> bool:
    return True


def _fused(choice: KernelChoice, rule: AttentionRule, *_: Any) -> CudaFlash:
    return CudaFlash(rule)


_CHOICE = "megatron.seq1f1b.model.kernels.choice.KernelChoice"

_FOR_FAKES = (
    Patch("torch.nn.Module._apply", _apply, "swaps the contents of parameters, which fake ones do not take"),
    Patch("torch.distributed.new_group", _fake_group, "makes gloo or NCCL look for the other ranks", wraps=True),
    Patch("torch.distributed.all_gather_object", _own_object_everywhere, "reads sizes that others would send"),
    Patch("torch.distributed.broadcast_object_list", _own_objects, "reads sizes that others would send"),
    Patch("megatron.core.optimizer.optimizer.get_grad_norm_fp32", _no_norm, "reads the norm of every gradient"),
    Patch(
        "megatron.training.training.logical_and_across_model_parallel_group",
        _own_answer,
        "reads what other ranks would send",
    ),
)

_AS_ON_A_GPU = (
    Patch(f"{_CHOICE}.is_on_gpu", _always, "fake tensors appear to be on the CPU"),
    Patch(f"{_CHOICE}._fused", _fused, "flash-attn keeps as much, but need not be installed here"),
)
