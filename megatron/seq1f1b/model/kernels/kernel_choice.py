"""The choice of a kernel for a layer, by Megatron's own flags for attention."""

from collections.abc import Callable
from functools import cache
from operator import attrgetter

import torch
import torch.nn.attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ...process.megatron_versions import flash_attention_version
from ...process.ranks import warn_on_rank_0
from .flash import CpuFlash, CudaFlash, FlashAttention4, why_not_3
from .interface import AttentionRule, Kernel
from .padded import Padded
from .transformer_engine import TransformerEngineFused
from .unfused import Unfused

_LARGEST_HEAD = 256  # of fused kernels on GPUs
_HEAD_MULTIPLE = 8  # of head sizes of fused kernels on GPUs


class KernelChoice:
    """The choice for all attention layers of a model; warns once, on rank 0, if no fused kernel fits.

    `backend` is Megatron's --attention-backend: `unfused` and `local` mean plain matrix products, `fused` Transformer
    Engine's attention on GPUs, anything else FlashAttention. `flash_attention_version` is Megatron's flag: 2 for
    PyTorch's operators, 3 for these on FlashAttention 3, 4 for flash-attn-4; None takes 3 on Hopper GPUs if it is
    installed, else 2, also for a model that `has_dropout`, which 3 and 4 lack. A process runs on one version.

    A rehearsal, whose tensors are on no device, says itself whether a tensor `is_on_gpu`, and which `fused` kernel
    stands for those of GPUs.
    """

    def __init__(
        self,
        backend: str = "auto",
        flash_attention_version: int | None = None,
        has_dropout: bool = False,
        is_on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda"),
        fused: Callable[[AttentionRule], Kernel] | None = None,
    ) -> None:
        self._backend = backend
        self._wants_products = backend in ("unfused", "local")
        self._given_version = flash_attention_version
        self._has_dropout = has_dropout
        self._is_on_gpu = is_on_gpu
        self._fused = fused or self._installed
        self._chosen = cache(self._choose)
        self._version = cache(self._best_version)
        self._warn_once = cache(warn_on_rank_0)

    @classmethod
    def of_config(cls, config: TransformerConfig, **of_rehearsal: Callable) -> "KernelChoice":
        """The choice by the flags in Megatron's configuration of a model."""
        return cls(
            backend=config.attention_backend.name,
            flash_attention_version=flash_attention_version(config),
            has_dropout=config.attention_dropout > 0,
            **of_rehearsal,
        )

    def kernel(self, rule: AttentionRule, query: Tensor, value: Tensor) -> Kernel:
        """The kernel of `rule` for queries [n, b, h, d] and values [m, b, g, e]."""
        return self._chosen(rule, self._is_on_gpu(query), query.dtype, query.shape[3], value.shape[3])

    def name(self, rule: AttentionRule, is_cuda: bool, dtype: torch.dtype, size: int, value_size: int) -> str:
        """The choice of `kernel` in words."""
        if self._wants_products or _not_fused(rule, is_cuda, dtype, max(size, value_size)):
            return "plain matrix products"
        if not is_cuda:
            return "PyTorch's flash attention for CPUs"
        if self._backend == "fused":
            return "Transformer Engine's fused attention"
        version = self._version()
        return f"FlashAttention-{version}" + (" of PyTorch" if version == 2 else "")

    def _choose(self, rule: AttentionRule, is_cuda: bool, dtype: torch.dtype, size: int, value_size: int) -> Kernel:
        if self._wants_products:
            return Unfused(rule)
        not_fused = _not_fused(rule, is_cuda, dtype, max(size, value_size))
        if not_fused is not None:
            self._warn_once(f"{not_fused} has no fused kernel: plain matrix products compute it, more slowly")
            return Unfused(rule)
        kernel: Kernel = self._fused(rule) if is_cuda else CpuFlash(rule)
        multiple = _HEAD_MULTIPLE if is_cuda else 1
        sizes_fit = size == value_size or isinstance(kernel, FlashAttention4 | TransformerEngineFused)
        fits = sizes_fit and not size % multiple and not value_size % multiple
        return kernel if fits else Padded(kernel, multiple)

    def _installed(self, rule: AttentionRule) -> Kernel:
        if self._backend == "fused":
            return TransformerEngineFused(rule)
        return FlashAttention4(rule) if self._version() == 4 and rule.window is None else CudaFlash(rule)

    def _best_version(self) -> int:
        """The version for this process; switches its operators. Raises ValueError for 3 with dropout, which PyTorch's
        operators refuse on it, and which the functions of the package itself do not take."""
        version = self._given_version or 2
        if version == 3 and self._has_dropout:
            raise ValueError("--flash-attention-version 3 has no attention dropout; drop it or --attention-dropout")
        if self._given_version is None and not self._has_dropout and torch.cuda.get_device_capability()[0] == 9:
            reason = why_not_3()
            if reason is None:
                version = 3
            else:
                self._warn_once(f"attention runs on FlashAttention-2 instead of FlashAttention-3: {reason}")
        if version == 3:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        return version


def _not_fused(rule: AttentionRule, is_cuda: bool, dtype: torch.dtype, size: int) -> str | None:
    """The feature of attention with heads of `size` that no fused kernel has, in words; None if one has them all."""
    if not is_cuda:
        if rule.dropout:
            return "attention dropout on a CPU"
        return None if rule.window is None else "a window on a CPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"attention in {dtype} on a GPU"
    return f"attention heads of more than {_LARGEST_HEAD}" if size > _LARGEST_HEAD else None
