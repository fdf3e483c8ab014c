"""Which kernel serves a layer, by Megatron's own flags for attention."""

import logging

import torch
from torch import Tensor

from ...ranks import warn_on_rank_0
from .cpu import CpuFlash
from .cpu_window import CpuWindow
from .cuda import CudaFlash
from .flash_attn_2 import FlashAttention2
from .flash_attn_4 import FlashAttention4
from .flash_version import activate_flash_attention, best_version
from .interface import AttentionRule, Kernel
from .padded import Padded
from .transformer_engine import TransformerEngineFused
from .unfused import Unfused

_log = logging.getLogger(__name__)

# The largest head of each kernel, and what the sizes of heads have to be multiples of.
_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8


class KernelChoice:
    """Made once for the attention layers of a model; warns once, on rank 0, where no fused kernel serves.

    `backend` is Megatron's --attention-backend: `unfused` and `local` mean plain matrix products, `fused` means
    Transformer Engine's attention on GPUs, anything else the fastest kernel. `flash_attention_version` is its
    --flash-attention-version: None for PyTorch's own operators on the fastest FlashAttention that is installed, 3 and 4
    for those operators on that version, 2 for the package flash-attn. Versions 3 and 4 have no dropout, and a process
    has one of them: where a model `has_dropout`, PyTorch's built-in version 2 stays.
    """

    def __init__(
        self, backend: str = "auto", flash_attention_version: int | None = None, has_dropout: bool = False
    ) -> None:
        self._backend = backend
        self._version = flash_attention_version
        self._has_dropout = has_dropout
        self._is_activated = False
        self._chosen: dict[tuple, Kernel] = {}
        self._warned: set[str] = set()

    def kernel(self, rule: AttentionRule, query: Tensor, value: Tensor) -> Kernel:
        """The kernel by which `rule` is computed for queries like [n, b, h, d] and values like [m, b, g, e].

        Chosen at the first tensors of a device, type and head sizes; later ones get the same kernel.
        """
        key = rule, self.is_on_gpu(query), query.dtype, query.shape[3], value.shape[3]
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    @staticmethod
    def is_on_gpu(tensor: Tensor) -> bool:
        """Whether GPU kernels serve a tensor; a rehearsal replaces this, since its tensors are not on a GPU."""
        return tensor.is_cuda

    def name(self, rule: AttentionRule, is_cuda: bool, dtype: torch.dtype, size: int, value_size: int) -> str:
        """What `kernel` is going to choose, in words."""
        is_fused = self._backend not in ("unfused", "local")
        if is_cuda:
            is_fused &= dtype in (torch.bfloat16, torch.float16) and max(size, value_size) <= _LARGEST_HEAD
        else:
            is_fused &= not rule.dropout
        if not is_fused:
            return "plain matrix products"
        if not is_cuda:
            return "PyTorch's flash attention for CPUs"
        if self._backend == "fused":
            return "Transformer Engine's fused attention"
        if self._version == 2:
            return "FlashAttention-2 of the package flash-attn"
        version = 2 if self._has_dropout else best_version(self._version)
        return f"FlashAttention-{version}" + (" of PyTorch" if version == 2 else "")

    def _choose(self, rule: AttentionRule, is_cuda: bool, dtype: torch.dtype, size: int, value_size: int) -> Kernel:
        if self._backend in ("unfused", "local"):
            return Unfused(rule)
        if not is_cuda:
            if rule.dropout:
                return self._unfused(rule, "attention dropout on a CPU")
            kernel = CpuFlash(rule) if rule.window is None else CpuWindow(rule)
            return kernel if size == value_size else Padded(kernel)
        if dtype not in (torch.bfloat16, torch.float16):
            return self._unfused(rule, f"attention in {dtype} on a GPU")
        if max(size, value_size) > _LARGEST_HEAD:
            return self._unfused(rule, f"attention heads of more than {_LARGEST_HEAD}")
        kernel = self._fused(rule, size == value_size)
        sizes_fit = size == value_size or isinstance(kernel, FlashAttention4 | TransformerEngineFused)
        fits = sizes_fit and not size % _HEAD_MULTIPLE and not value_size % _HEAD_MULTIPLE
        return kernel if fits else Padded(kernel, _HEAD_MULTIPLE)

    def _fused(self, rule: AttentionRule, is_one_size: bool) -> Kernel:
        if self._backend == "fused":
            return TransformerEngineFused(rule)
        if self._version == 2:
            return FlashAttention2(rule)
        if self._version == 4 and not is_one_size and not self._has_dropout and rule.window is None:
            return FlashAttention4(rule)
        if self._has_dropout:
            if self._version in (3, 4):
                self._warn_once(
                    f"FlashAttention-{self._version} has no attention dropout: PyTorch's own version 2 takes its place."
                )
        elif not self._is_activated:
            activate_flash_attention(self._version)
            self._is_activated = True
        return CudaFlash(rule)

    def _unfused(self, rule: AttentionRule, what: str) -> Kernel:
        self._warn_once(f"{what} has no fused kernel: plain matrix products take its place, several times slower.")
        return Unfused(rule)

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            warn_on_rank_0(_log, warning)
        self._warned.add(warning)
