"""FlashAttention on GPUs; all versions align their causal mask bottom-right: one call per segment."""

from dataclasses import dataclass
from importlib import import_module

import torch
import torch.nn.attention
from torch import Tensor

from ..packed_documents import CumulativeLengths
from .interface import AttentionRule, Gradients, Saved

_flash = torch.ops.aten._flash_attention_forward
# Leaves out the random state, which version 3 fills with zeros, and writes the output where it is told to. PyTorch 2.6
# lacks it.
_flash_without_dropout = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)
_flash_backward = torch.ops.aten._flash_attention_backward
_MODULES = {3: "flash_attn_interface", 4: "flash_attn.cute.interface"}


@dataclass(frozen=True)
class CudaFlash:
    """PyTorch's operators, which are FlashAttention 2 unless the process has activated version 3.

    bf16 and fp16; heads of one size, a multiple of 8 up to 256; grouped KV heads without expansion; dropout in
    version 2.
    """

    rule: AttentionRule

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        lengths = None, None, query.shape[0], key.shape[0]
        output, statistics = self._forward(*(x.transpose(0, 1) for x in (query, key, value)), lengths)
        return output.transpose(0, 1).flatten(2).contiguous(), statistics

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, statistics = saved
        lengths = None, None, query.shape[0], key.shape[0]
        tensors = grad_output.reshape(query.shape), query, key, value, output.reshape(query.shape)
        grads = self._backward(*(x.transpose(0, 1) for x in tensors), statistics, lengths)
        return Gradients.of_last_keys(*(x.transpose(0, 1) for x in grads))

    def forward_packed(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: CumulativeLengths
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._forward(query, key, value, lengths)

    def backward_packed(
        self, grad_output: Tensor, saved: Saved, lengths: CumulativeLengths
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(grad_output, *saved, lengths)

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple) -> tuple[Tensor, tuple[Tensor, ...]]:
        call = query, key, value, *lengths, self.rule.dropout, True, False
        if self.rule.dropout or _flash_without_dropout is None:
            # The random state comes as two tensors, of which some versions of PyTorch leave one unused.
            output, logsumexp, *rng_state, _ = _flash(*call, scale=self.rule.scale, **self._window)
            return output, (logsumexp, *rng_state)
        output = torch.empty_like(query)  # with the strides of the query
        return output, (_flash_without_dropout(output, *call, scale=self.rule.scale, **self._window),)

    def _backward(
        self,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        statistics: tuple[Tensor, ...],
        lengths: tuple,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logsumexp, *rng_state = statistics
        if not rng_state:  # nothing reads it
            rng_state = [query.new_empty(shape, dtype=torch.uint64) for shape in (2, ())]
        call = grad_output, query, key, value, output, logsumexp, *lengths, self.rule.dropout, True, *rng_state
        return _flash_backward(*call, scale=self.rule.scale, **self._window)

    @property
    def _window(self) -> dict[str, int]:
        """Keys that a query sees before and after its own token."""
        return {} if self.rule.window is None else {"window_size_left": self.rule.window, "window_size_right": 0}


class FlashAttention4:
    """The kernels of the package flash-attn-4 (`flash_attn.cute`), for Hopper and Blackwell GPUs.

    bf16 and fp16; grouped KV heads; no dropout, no window. Head sizes are multiples of 8, those of queries and values
    may differ. Hopper takes all up to 256; Blackwell takes those up to 128, 192 with values of 128, and 256.
    """

    def __init__(self, rule: AttentionRule) -> None:
        assert rule.dropout == 0 and rule.window is None, "the kernel has no dropout, and our call no window"
        self._rule = rule
        package = import_module(_MODULES[4])
        self._forward, self._backward = package._flash_attn_fwd, package._flash_attn_bwd

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        # Later versions return more than the two.
        output, logsumexp, *_ = self._forward(
            *(x.transpose(0, 1) for x in (query, key, value)),
            softmax_scale=self._rule.scale,
            causal=True,
            return_lse=True,
        )
        return output.transpose(0, 1).flatten(2).contiguous(), (logsumexp,)

    def backward(self, grad_output: Tensor, saved: Saved) -> Gradients:
        query, key, value, output, (logsumexp,) = saved
        heads = query.shape[2], value.shape[3]
        grads = self._backward(
            *(x.transpose(0, 1) for x in (query, key, value)),
            *(x.unflatten(2, heads).transpose(0, 1) for x in (output, grad_output)),
            logsumexp,
            softmax_scale=self._rule.scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return Gradients.of_last_keys(*(x.transpose(0, 1) for x in grads[:3]))


def why_not(number: int) -> str | None:
    """Why FlashAttention 3 or 4 cannot be used here, in words; None if it can."""
    major, _ = torch.cuda.get_device_capability()
    if number == 3 and major != 9:
        return "it is made for Hopper GPUs"
    if number == 4 and major not in (9, 10):
        return "it is made for Hopper and Blackwell GPUs"
    if number == 3 and not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return "install a PyTorch that can switch to it, such as 2.13"
    package = "FlashAttention-3 (the folder hopper of flash-attention)" if number == 3 else "the package flash-attn-4"
    try:
        import_module(_MODULES[number])
    except Exception as error:  # whatever its compiler or its loader raises
        return f"install {package}; {_MODULES[number]} cannot be imported ({error})"
    return None
