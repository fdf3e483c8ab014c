"""Which kernel serves a layer, by Megatron's own flags for attention."""

import logging

import torch
from torch import Tensor

from ...ranks import is_rank_0, warn_on_rank_0
from .adapted import Padded
from .cpu import CpuFlash, CpuWindow
from .flash import CudaFlash, FlashAttention4, activate_flash_attention_3, why_not
from .interface import AttentionRule, Kernel
from .transformer_engine import TransformerEngineFused
from .unfused import Unfused

_log = logging.getLogger(__name__)

# The largest head of each kernel, and what the sizes of heads have to be multiples of.
_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8


class KernelChoice:
    """Made once for the attention layers of a model; warns once, on rank 0, where no fused kernel serves.

    `backend` is Megatron's --attention-backend: `unfused` and `local` mean plain matrix products, `fused` means
    Transformer Engine's attention on GPUs, anything else FlashAttention. `flash_attention_version` is its
    --flash-attention-version: 2 for PyTorch's own operators, 3 for these operators on FlashAttention 3, 4 for
    flash-attn-4, which is taken only where it is asked for; None for 3 where it is installed, on Hopper GPUs, else 2.
    Versions 3 and 4 have no dropout, and the operators of a process run on one version: where a model `has_dropout`,
    that is 2. A version that cannot be used is replaced by 3, else 2, with a warning.
    """

    def __init__(
        self, backend: str = "auto", flash_attention_version: int | None = None, has_dropout: bool = False
    ) -> None:
        self._backend = backend
        self._asked_for = flash_attention_version
        self._has_dropout = has_dropout
        self._version: int | None = None  # once a layer needs it
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
        version, _ = self._best_version()
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
        kernel = self._fused(rule)
        sizes_fit = size == value_size or isinstance(kernel, FlashAttention4 | TransformerEngineFused)
        fits = sizes_fit and not size % _HEAD_MULTIPLE and not value_size % _HEAD_MULTIPLE
        return kernel if fits else Padded(kernel, _HEAD_MULTIPLE)

    def _fused(self, rule: AttentionRule) -> Kernel:
        if self._backend == "fused":
            return TransformerEngineFused(rule)
        if self._version is None:
            self._version = self._activated_version()
        if self._version == 4 and rule.window is None:
            return FlashAttention4(rule)
        return CudaFlash(rule)

    def _best_version(self) -> tuple[int, str | None]:
        """The version for this process, and why it is not the one that was asked for, or might be expected."""
        if self._asked_for == 2:
            return 2, None
        if self._has_dropout:
            return 2, None if self._asked_for is None else "it has no attention dropout"
        reason = None
        if self._asked_for == 4:
            reason = why_not(4)
            if reason is None:
                return 4, None
        on_3 = why_not(3)
        if on_3 is None:
            return 3, reason
        is_hopper = torch.cuda.get_device_capability()[0] == 9
        return 2, reason or (on_3 if self._asked_for == 3 or is_hopper else None)

    def _activated_version(self) -> int:
        version, reason = self._best_version()
        if version == 3:
            try:
                activate_flash_attention_3()
            except Exception as error:  # of a package built for another PyTorch
                version, reason = 2, f"its package cannot be used ({error})"
        if is_rank_0():
            _log.info("attention of segments runs on FlashAttention-%d", version)
        if reason is not None:
            wanted = f"FlashAttention-{self._asked_for or 3}"
            self._warn_once(
                f"attention runs on FlashAttention-{version} instead of {wanted}: {reason}; --attention-backend fused "
                "takes Transformer Engine's"
            )
        return version

    def _unfused(self, rule: AttentionRule, what: str) -> Kernel:
        self._warn_once(f"{what} has no fused kernel: plain matrix products take its place, several times slower.")
        return Unfused(rule)

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            warn_on_rank_0(_log, warning)
        self._warned.add(warning)
