"""Logits that a program reads without labels: computed when read, or never, since log-probabilities need only pieces.

Post-training takes log-probabilities of given tokens, and entropies, from the logits of a whole micro-batch. These take
b·s·V/t numbers, in 32 bits for models in 16, and as many for their gradient. `PieceLogits` stands for them: a tensor to
any program, with hidden states, b·s·h numbers, behind it. `token_log_probs` (token_log_probs.py) computes pieces of
logits from these, and again in its backward; any other operation computes all logits, once.

The program's backward ends at the joined hidden states, before those of the segments begin. The weight gradient is
complete then; it goes to `main_grad` past the hooks of Megatron's DistributedDataParallel, and the hooks fire when the
segments go backward.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from .main_grad import exact_main_grad, new_sum

PIECE = 2**26  # logits: 256 MiB in fp32, and enough rows for a product at full speed

Group = dist.ProcessGroup | None


@dataclass(eq=False)
class Head:
    """The output layer of a model: logits are `factor` times the product of hidden states with the `weight` [V/t, h].

    `group` divides the vocabulary. A piece has `piece` logits. With `waits`, the `main_grad` of the weight may be away
    while the loss goes backward. With `is_fused`, Apex's kernel adds products to it.
    """

    weight: Tensor
    group: Group
    factor: float
    piece: int
    waits: bool
    is_fused: bool

    def __post_init__(self) -> None:
        self._gradient: Tensor | None = None  # until a segment goes backward

    def hidden(self, hidden: Tensor) -> Tensor:
        """Hidden states whose backward gives the weight its gradient."""
        return _WithWeight.apply(self, hidden, self.weight)

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [..., V/t] for hidden states [..., h], without a graph."""
        logits = torch.nn.functional.linear(rows.detach(), self.weight.detach())
        return logits if self.factor == 1.0 else logits * self.factor

    def backward(self, rows: Sequence[Tensor], gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The gradient of hidden states [n, h], given in pieces; `gradient_of(number, piece)` is that of its logits."""
        of_hidden = rows[0].new_empty((sum(map(len, rows)), rows[0].shape[1]))
        target = self._target() if self.weight.requires_grad else None
        for number, (piece, of_piece) in enumerate(zip(rows, of_hidden.split(len(rows[0])), strict=True)):
            gradient = gradient_of(number, piece)
            if self.factor != 1.0:
                gradient = gradient * self.factor
            gradient = gradient.to(self.weight.dtype)
            torch.matmul(gradient, self.weight.detach(), out=of_piece)
            if target is not None:
                self._add_product(target, gradient, piece)
        return of_hidden

    def take_gradient(self) -> Tensor | None:
        """The gradient for the weight in the backward of a segment; zeros, for the hooks, if `main_grad` has it."""
        if not self.weight.requires_grad:
            return None
        gradient = self._gradient
        self._gradient = None
        main_grad = getattr(self.weight, "main_grad", None)
        if main_grad is None:
            return None if gradient is None else gradient.to(self.weight.dtype)
        if gradient is not None:
            main_grad += gradient
        # Is ignored if an earlier fused product has marked the weight.
        return torch.zeros_like(self.weight)

    def _target(self) -> Tensor:
        """Where products for the weight gradient add up."""
        main_grad = exact_main_grad(self.weight)
        if main_grad is not None and not self.waits:
            return main_grad
        if self._gradient is None:
            self._gradient = new_sum(self.weight)
        return self._gradient

    def _add_product(self, target: Tensor, gradient: Tensor, rows: Tensor) -> None:
        if self.is_fused and target.dtype is torch.float32:
            layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(rows, gradient, target)
        elif target.dtype is gradient.dtype:
            target.addmm_(gradient.t(), rows)
        else:
            target += gradient.t().matmul(rows)


class PieceLogits(torch.Tensor):
    """Logits [b, n, V/t] of hidden states [b, n, h], without a storage until something reads them."""

    hidden: Tensor
    head: Head
    _whole: list[Tensor]  # one tensor or none, shared with detached ones

    # As torch documents it for subclasses with a dispatch of their own; its stubs have another signature.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(hidden: Tensor, head: Head, dtype: torch.dtype | None = None) -> "PieceLogits":
        """The logits of hidden states, which may have a gradient, in the type of these or in another one."""
        logits = _AsLogits.apply(hidden, head, dtype or hidden.dtype)
        logits.hidden = hidden
        return logits

    def __new__(cls, hidden: Tensor, head: Head, dtype: torch.dtype, whole: list[Tensor]) -> "PieceLogits":
        shape = (*hidden.shape[:-1], head.weight.shape[0])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        self.hidden = hidden
        self.head = head
        self._whole = whole
        return self

    @property
    def is_whole(self) -> bool:
        """Whether the logits have been computed."""
        return bool(self._whole)

    def whole(self) -> Tensor:
        """The logits, without a graph."""
        if not self._whole:
            warnings.warn(
                "the program reads logits of more than 2 GiB, which are computed whole; "
                "megatron.seq1f1b.token_log_probs takes log-probabilities and entropies from them in pieces, and "
                "keep_logits=True (--keep-logits) keeps logits without a warning",
                stacklevel=2,
            )
            self._whole.append(self.head.logits(self.hidden).to(self.dtype))
        return self._whole[0]

    def joined_as(self, hidden: Tensor) -> "PieceLogits":
        """The logits of joined hidden states, of which these are a part."""
        return PieceLogits.of(hidden, self.head, self.dtype)

    def float(self) -> Tensor:  # which Megatron's Float16Module calls for what a model returns
        if self.is_whole or self.dtype is torch.float32:
            return super().float()
        return PieceLogits.of(self.hidden, self.head, torch.float32)

    def data_ptr(self) -> int:  # for kernels in Triton
        return self.whole().data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PieceLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # in torch's stubs it is no class method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            logits = args[0]
            return cls(logits.hidden.detach(), logits.head, logits.dtype, logits._whole)
        whole_args, whole_kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        result = func(*whole_args, **whole_kwargs)
        # An operation in place returns what it has changed.
        is_in_place = args and isinstance(args[0], cls) and result is whole_args[0]
        return args[0] if is_in_place else result


class _WithWeight(torch.autograd.Function):
    """Hidden states, whose backward takes the weight gradient from the head."""

    @staticmethod
    def forward(ctx: Any, head: Head, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.head = head
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_hidden: Tensor) -> tuple[Any, ...]:
        return None, grad_hidden, ctx.head.take_gradient()


class _AsLogits(torch.autograd.Function):
    """Logits for any operation; the backward has their whole gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Head, dtype: torch.dtype) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(hidden)
        return PieceLogits(hidden, head, dtype, [])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Any, ...]:
        (hidden,) = ctx.saved_tensors
        rows = hidden.flatten(0, -2)
        gradient = grad_logits.flatten(0, -2)
        return ctx.head.backward([rows], lambda number, piece: gradient).view(hidden.shape), None, None
