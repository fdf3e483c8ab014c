"""Weight gradients of linear layers, computed apart from the backward that gives the input gradients.

The backward of a linear layer has two independent halves: the input gradient, for which the previous stage waits, and
the weight gradient, which is not needed before the end of the step. Zero-bubble schedules (arXiv 2401.10241, section 2)
run the second where a rank would be idle.
"""

from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, layers
from torch import Tensor
from torch.autograd.function import once_differentiable

_autocast_forward = torch.amp.custom_fwd(device_type="cuda")
_autocast_backward = torch.amp.custom_bwd(device_type="cuda")


class Work(NamedTuple):
    """A product that is still to be computed: `gradients()` gives one for each of the parameters.

    None for a parameter means that its gradient is already complete, for instance because it was added to `main_grad`.
    """

    parameters: tuple[torch.nn.Parameter, ...]
    gradients: Callable[[], tuple[Tensor | None, ...]]


class WeightGradientStore:
    """The weight gradients that are still to be computed, by the unit whose backward left them.

    Holds inputs and output gradients of the unit's linear layers: b·n·(i + o)·e bytes for n tokens, b sequences, i and
    o features, e bytes an element.
    """

    def __init__(self) -> None:
        self._left: dict[Hashable, deque[Work]] = {}
        self._collecting: deque[Work] | None = None

    def collecting(self, unit: Hashable) -> AbstractContextManager[None]:
        """What is left inside belongs to `unit`."""
        return _Collecting(self, unit)

    def leave(self, work: Work) -> None:
        """Keep the work for the unit whose backward runs."""
        assert self._collecting is not None, "a split backward ran outside of a schedule"
        self._collecting.append(work)

    def compute(self, unit: Hashable) -> None:
        """Compute what was left for `unit`, freeing it one by one.

        Like all gradients these reach the parameters' hooks through autograd, where Megatron's DistributedDataParallel
        collects them.
        """
        left = self._left.pop(unit)
        while left:
            work = left.popleft()
            _WeightGradient.apply(work.gradients, *work.parameters).backward()

    def clear(self) -> None:
        """Forget everything, after a step that failed."""
        self._left.clear()

    def assert_empty(self) -> None:
        """No weight gradient is forgotten, no activation outlives a step."""
        assert not self._left, f"the weight gradients of {len(self._left)} units outlived the step"


class _Collecting:
    """A class, since a generator takes the host several times as long, in every unit."""

    __slots__ = ("_store", "_unit")

    def __init__(self, store: WeightGradientStore, unit: Hashable) -> None:
        self._store = store
        self._unit = unit

    def __enter__(self) -> None:
        self._store._collecting = self._store._left.setdefault(self._unit, deque())

    def __exit__(self, *_: object) -> None:
        self._store._collecting = None


def deferring(linear: Callable[..., Tensor], store: WeightGradientStore) -> Callable[..., Tensor]:
    """`linear`, the `_forward_impl` of a Megatron linear layer, with its weight gradient left in `store`.

    Only the product with the weight is split; the bias, cheap as it is, gets its gradient with the input. Where there
    is nothing to split (frozen weights, weights that are computed, inputs without a gradient) `linear` runs as it is.
    """

    def split(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None = None,
        gtp_remat_size: int = 1,
        **kwargs,
    ) -> Tensor:
        is_split = input.requires_grad and weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
        if not is_split or gtp_remat_size > 1:
            return linear(
                input=input,
                weight=weight,
                bias=bias,
                gradient_accumulation_fusion=gradient_accumulation_fusion,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                gtp_remat_size=gtp_remat_size,
                **kwargs,
            )
        group = tp_group if sequence_parallel else None

        def leave(input: Tensor, grad_output: Tensor) -> None:
            accumulate = gradient_accumulation_fusion and hasattr(weight, "main_grad")
            store.leave(Work((weight,), partial(_gradient, weight, input, grad_output, group, accumulate)))

        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = _InputGradient.apply(input, weight.detach(), group, leave)
        return output if bias is None else output + bias

    return split


class _InputGradient(torch.autograd.Function):
    """input · weightᵀ; its backward gives the gradient of the input, and what that of the weight needs to `leave`.

    The weight is detached, or autograd would call its hooks before its gradient exists.
    """

    @staticmethod
    @_autocast_forward
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, gather_group: dist.ProcessGroup | None, leave: Callable
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.gather_group, ctx.leave = gather_group, leave
        return torch.matmul(_gathered(input, gather_group), weight.t())

    @staticmethod
    @once_differentiable
    @_autocast_backward
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        ctx.leave(input, grad_output)
        grad_input = grad_output.matmul(weight)
        if ctx.gather_group is not None:
            whole, grad_input = grad_input, torch.empty_like(input)
            dist.reduce_scatter_tensor(grad_input, whole.contiguous(), group=ctx.gather_group)
        return grad_input, None, None, None


class _WeightGradient(torch.autograd.Function):
    """A scalar whose backward gives the gradients of parameters."""

    @staticmethod
    def forward(
        ctx: Any, gradients: Callable[[], tuple[Tensor | None, ...]], *parameters: torch.nn.Parameter
    ) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        gradients = ctx.gradients
        del ctx.gradients
        return None, *gradients()


def _gradient(
    weight: torch.nn.Parameter,
    input: Tensor,
    grad_output: Tensor,
    gather_group: dist.ProcessGroup | None,
    accumulate: bool,
) -> tuple[Tensor | None]:
    """The gradient of a weight [o, i], from its input [n, b, i] and output gradient [n', b, o].

    With `gather_group` the n tokens of the input are this rank's part of the n' (sequence parallelism). `accumulate`
    adds it to the weight's `main_grad` by Apex's kernel.
    """
    input = _gathered(input, gather_group).flatten(0, -2)
    grad_output = grad_output.flatten(0, -2)
    if not accumulate:
        return (grad_output.t().matmul(input),)
    kernels = layers.fused_weight_gradient_mlp_cuda
    in_fp32 = weight.main_grad.dtype is torch.float32
    kernel = kernels.wgrad_gemm_accum_fp32 if in_fp32 else kernels.wgrad_gemm_accum_fp16
    kernel(input.contiguous(), grad_output.contiguous(), weight.main_grad)
    return (accumulated(weight),)


def accumulated(weight: torch.nn.Parameter) -> Tensor | None:
    """The gradient that autograd passes to the hooks of a weight whose gradient was added to its `main_grad`.

    `grad_added_to_main_grad` keeps DistributedDataParallel from adding it again. Where another layer gives the same
    weight a gradient the ordinary way (`zero_out_wgrad`: tied embeddings) it is added after all, so it has to be zero.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _gathered(input: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tokens of all ranks of `group`, in a buffer that the next call reuses; `input` itself without a group."""
    if group is None:
        return input
    shape = [input.shape[0] * group.size(), *input.shape[1:]]
    whole = get_global_memory_buffer().get_tensor(shape, input.dtype, "mpu")
    dist.all_gather_into_tensor(whole, input.contiguous(), group=group)
    return whole
