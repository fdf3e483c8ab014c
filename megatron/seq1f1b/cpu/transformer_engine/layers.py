"""Replacements of what Transformer Engine's layers do only for a GPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def made_without_gpu(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a layer, which demands that a GPU is visible and then does not use it."""

    @functools.wraps(init)
    def initialize(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        is_available = torch.cuda.is_available
        torch.cuda.is_available = lambda: True
        try:
            init(layer, *args, **kwargs)
        finally:
            torch.cuda.is_available = is_available

    return initialize


def prepare_forward(
    layer: Any,
    inp: Tensor,
    num_gemms: int = 1,
    allow_non_contiguous: bool = False,
    allow_different_data_and_param_types: bool = False,
) -> Tensor:
    """The part of a layer's `prepare_forward` that is not about fp8 and does not refuse CPU tensors."""
    layer.fast_setattr("allow_different_data_and_param_types", allow_different_data_and_param_types)
    layer.fast_setattr("forwarded_at_least_once", True)
    layer.set_activation_dtype(inp)
    layer.init_fp8_metadata(num_gemms=num_gemms)
    return inp if allow_non_contiguous else inp.contiguous()


def attend(*args: Any, **kwargs: Any) -> None:
    """Attention, whose CUDA kernels have no stand-in."""
    raise ValueError(
        "Transformer Engine's attention does not run on a CPU; add --sequence-splits, for attention that does, or use "
        "--transformer-impl local"
    )


def placeholder(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """What a layer returns as the gradient of a weight whose `main_grad` it has written."""
    return torch.zeros(shape, dtype=dtype)


class Hopper:
    """Properties of a GPU, by which the layers choose kernels and sizes of buffers that a CPU has no use for."""

    name = "CPU"
    major, minor = 9, 0
    multi_processor_count = 1
    total_memory = 80 << 30


def properties(device: Any = None) -> type[Hopper]:
    return Hopper


def capability(device: Any = None) -> tuple[int, int]:
    return Hopper.major, Hopper.minor
