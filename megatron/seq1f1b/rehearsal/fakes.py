"""What Megatron has to be spared on tensors without values: one table, with the reasons."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..model.kernels import AttentionRule, CudaFlash, KernelChoice
from ..patches import Patch, PatchTable, Scope
from .packing import documents_of_step


def spared(device: str) -> PatchTable:
    """What is bound while a stage runs on tensors without values; kernels are a GPU's unless `device` is the CPU."""
    return PatchTable(Scope.STEP, _FOR_FAKES + (() if device == "cpu" else _AS_ON_A_GPU))


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


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _type_without_device(type_method: Callable) -> Callable:
    def name_or_cast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_method(tensor, *args, **kwargs)
        return found.replace(".meta.", ".") if isinstance(found, str) else found

    return name_or_cast


def _own_counts_of_all(gather: Callable) -> Callable:
    def gathered(own: torch.Tensor, group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> torch.Tensor:
        if own.is_meta or group.size() == 1:
            return gather(own, group, *args, **kwargs)
        return own.repeat(group.size(), *[1] * (own.dim() - 1))

    return gathered


def _without_fp8(init: Callable) -> Callable:
    def initialize(checkpoint: Any, fp8: Any = None) -> None:
        init(checkpoint, None)

    return initialize


def _moves() -> Callable:
    return _moved


def _moved(discarded: torch.Tensor, recomputed: torch.Tensor) -> None:
    size = recomputed.untyped_storage().nbytes()
    recomputed.untyped_storage().resize_(0)
    discarded.untyped_storage().resize_(size)


def _always(*args: Any) -> bool:
    return True


def _fused(choice: KernelChoice, rule: AttentionRule, *_: Any) -> CudaFlash:
    return CudaFlash(rule)


_CHOICE = "megatron.seq1f1b.model.kernels.choice.KernelChoice"

_FOR_FAKES = (
    Patch("torch.Tensor.type", _type_without_device, "names the device, which Megatron's optimizers check", wraps=True),
    Patch("torch.distributed.new_group", _fake_group, "makes gloo or NCCL look for the other ranks", wraps=True),
    Patch("torch.distributed.all_gather_object", _own_object_everywhere, "reads sizes that others would send"),
    Patch("torch.distributed.broadcast_object_list", _own_objects, "reads sizes that others would send"),
    Patch("torch.distributed.send_object_list", _nothing, "sends sizes that nobody reads"),
    Patch("torch.distributed.recv_object_list", _own_objects, "reads sizes that others would send"),
    Patch("megatron.core.optimizer.optimizer.get_grad_norm_fp32", _no_norm, "reads the norm of every gradient"),
    Patch(
        "megatron.training.training.logical_and_across_model_parallel_group",
        _own_answer,
        "reads what other ranks would send",
    ),
    Patch(
        "megatron.training.training.set_jit_fusion_options",
        _nothing,
        "warms kernels up on real tensors as large as those of the step",
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
        _own_counts_of_all,
        "gathers into a tensor without values how many tokens each expert gets",
        wraps=True,
    ),
    Patch(
        "megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__",
        _without_fp8,
        "asks Transformer Engine, which need not be installed here, how it computes in fp8",
        wraps=True,
    ),
    Patch(
        "megatron.core.tensor_parallel.random._get_share_storage",
        _moves,
        "compiles what shares memory of tensors, which here have none",
    ),
    Patch("megatron.seq1f1b.runtime.communication._has_left", _always, "asks work that nobody does if it is done"),
    Patch("megatron.seq1f1b.runtime.executor.documents_of_step", documents_of_step, "looks for documents in tokens"),
)

_AS_ON_A_GPU = (
    Patch(f"{_CHOICE}.is_on_gpu", _always, "tensors without values are on no GPU"),
    Patch(f"{_CHOICE}._fused", _fused, "flash-attn keeps as much, but need not be installed here"),
)
