"""Which kernel serves a tensor, by Megatron's own flags for attention."""

import os
import sys
from functools import cached_property

import torch
from torch import Tensor

from .cpu import CpuFlash
from .cuda import CudaFlash
from .flash_attn_2 import FlashAttention2
from .flash_attn_4 import FlashAttention4
from .interface import Kernel
from .padded import Padded
from .unfused import Unfused

# The largest head of each kernel, and what the sizes of heads have to be multiples of.
_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8


class KernelChoice:
    """Made once for the attention layers of a model; says once, on rank 0, where no fused kernel serves.

    `backend` is Megatron's --attention-backend: `unfused` and `local` ask for plain matrix products, anything else for
    the fastest kernel. `flash_attention_version` is its --flash-attention-version: None for PyTorch's own operators,
    which need no other package, 2 for the package flash-attn, 4 for flash-attn-4.
    """

    def __init__(self, backend: str = "auto", flash_attention_version: int | None = None) -> None:
        self._is_unfused = backend in ("unfused", "local")
        self._version = flash_attention_version
        self._said: set[str] = set()

    def kernel(self, query: Tensor, value: Tensor, dropout: float) -> Kernel:
        """The kernel for query [n, b, h, d] and value [m, b, g, e]."""
        if self._is_unfused:
            return Unfused()
        sizes = query.shape[3], value.shape[3]
        if not query.is_cuda:
            if dropout:
                return self._unfused("attention dropout on a CPU")
            return CpuFlash() if sizes[0] == sizes[1] else Padded(CpuFlash())
        if query.dtype not in (torch.bfloat16, torch.float16):
            return self._unfused(f"attention in {query.dtype} on a GPU")
        if max(sizes) > _LARGEST_HEAD:
            return self._unfused(f"attention heads of more than {_LARGEST_HEAD}")
        fits = sizes[0] == sizes[1] and sizes[0] % _HEAD_MULTIPLE == 0
        kernel = self._flash(dropout)
        return kernel if fits else Padded(kernel, _HEAD_MULTIPLE)

    def _flash(self, dropout: float) -> Kernel:
        if self._version == 2:
            return self._flash_attention_2
        if self._version == 4:
            if not dropout:
                return self._flash_attention_4
            self._say("flash-attn-4 has no attention dropout: PyTorch's own flash attention takes its place.")
        return CudaFlash()

    @cached_property
    def _flash_attention_2(self) -> Kernel:
        return FlashAttention2()

    @cached_property
    def _flash_attention_4(self) -> Kernel:
        return FlashAttention4()

    def _unfused(self, what: str) -> Kernel:
        self._say(f"{what} has no fused kernel: plain matrix products take its place, several times slower.")
        return Unfused()

    def _say(self, warning: str) -> None:
        if warning not in self._said and int(os.environ.get("RANK", "0")) == 0:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        self._said.add(warning)
