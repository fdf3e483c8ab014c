"""FlashAttention on GPUs. All versions align their causal mask bottom-right, so a segment takes one call."""

from dataclasses import dataclass
from importlib import import_module

import torch
import torch.nn.attention
from torch import Tensor

from ..packed_documents import CumulativeLengths
from .interface import AttentionRule, DocumentKernel, Gradients, Saved

_flash = torch.ops.aten._flash_attention_forward
# Without the random state, which version 3 fills with zeros; PyTorch 2.6 lacks this operator.
_flash_without_dropout = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)
_flash_backward = torch.ops.aten._flash_attention_backward
# The module of a version, its GPUs with their compute capabilities, and the package to install.
_VERSIONS = {
    3: ("flash_attn_interface", "Hopper", (9,), "FlashAttention-3 (the folder hopper of flash-attention)"),
    4: ("flash_attn.cute.interface", "Hopper and Blackwell", (9, 10), "the package flash-attn-4"),
}


@dataclass(frozen=True)
class CudaFlash(DocumentKernel):
    """PyTorch's operators, which are FlashAttention 2 unless the process has activated version 3.

    bf16 and fp16; heads of one size, a multiple of 8 up to 256; grouped KV heads without expansion; dropout in
    version 2.
    """

    rule: AttentionRule

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: CumulativeLengths | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        query, key, value = map(_turned, (query, key, value))
        lengths = documents or (None, None, query.shape[1], key.shape[1])
        call = query, key, value, *lengths, self.rule.dropout, True, False
        if self.rule.dropout or _flash_without_dropout is None:
            # The random state has two tensors, one of which some versions of PyTorch do not use.
            output, *statistics, _ = _flash(*call, **self._options)
        else:
            output = torch.empty_like(query)  # with the strides of the query
            statistics = [_flash_without_dropout(output, *call, **self._options)]
        return _turned(output).contiguous(), tuple(statistics)

    def backward(self, grad_output: Tensor, saved: Saved, documents: CumulativeLengths | None = None) -> Gradients:
        *tensors, (logsumexp, *rng_state) = saved
        grad_output, query, key, value, output = map(_turned, (grad_output, *tensors))
        if not rng_state:  # nothing reads it
            rng_state = [query.new_empty(shape, dtype=torch.uint64) for shape in (2, ())]
        lengths = documents or (None, None, query.shape[1], key.shape[1])
        call = grad_output, query, key, value, output, logsumexp, *lengths, self.rule.dropout, True, *rng_state
        return Gradients(*map(_turned, _flash_backward(*call, **self._options)))

    @property
    def _options(self) -> dict[str, float]:
        """The scale, and the keys that a query sees before and after its own token."""
        window = self.rule.window
        sizes = {} if window is None else {"window_size_left": window, "window_size_right": 0}
        return {"scale": self.rule.scale, **sizes}


class FlashAttention4:
    """The kernels of the package flash-attn-4 (`flash_attn.cute`), for Hopper and Blackwell GPUs.

    bf16 and fp16; grouped KV heads; no dropout, no window. Head sizes are multiples of 8, those of queries and values
    may differ. Hopper takes all up to 256; Blackwell takes those up to 128, 192 with values of 128, and 256.
    """

    def __init__(self, rule: AttentionRule) -> None:
        assert rule.dropout == 0 and rule.window is None, "the kernel has no dropout, and our call no window"
        self._options = {"softmax_scale": rule.scale, "causal": True}
        self._package = import_module(_VERSIONS[4][0])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        call = map(_turned, (query, key, value))
        # Later versions return more than the two.
        output, logsumexp, *_ = self._package._flash_attn_fwd(*call, return_lse=True, **self._options)
        return _turned(output).contiguous(), (logsumexp,)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        *tensors, (logsumexp,) = saved
        call = *map(_turned, (*tensors, grad_output)), logsumexp
        deterministic = torch.are_deterministic_algorithms_enabled()
        grads = self._package._flash_attn_bwd(*call, deterministic=deterministic, **self._options)
        return Gradients(*map(_turned, grads[:3]))


def _turned(x: Tensor) -> Tensor:
    """[n, b, h, d] to [b, n, h, d] and back; [n, h, d], of one sequence, stays as it is."""
    return x.transpose(0, 1) if x.dim() == 4 else x


def why_not(number: int) -> str | None:
    """Why FlashAttention 3 or 4 cannot be used here; None if it can."""
    module, gpus, capabilities, package = _VERSIONS[number]
    if torch.cuda.get_device_capability()[0] not in capabilities:
        return f"it is made for {gpus} GPUs"
    if number == 3 and not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return "install a PyTorch that can switch to it, such as 2.13"
    try:
        import_module(module)
    except Exception as error:  # of any kind, from its compiler or its loader
        return f"install {package}; {module} cannot be imported ({error})"
    return None
