"""Linear layers with their weight gradients apart: Megatron's local ones, and Transformer Engine's."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, layers
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..patches import Patch, PatchTable, patched_on
from .loss_pieces import keeps_logits
from .weight_gradient import WeightGradientStore, Work, accumulated
from .weight_gradient_te import products_left_in

_autocast_forward = torch.amp.custom_fwd(device_type="cuda")
_autocast_backward = torch.amp.custom_bwd(device_type="cuda")


def defer_weight_gradients(store: WeightGradientStore, chunks: Iterable[torch.nn.Module]) -> ExitStack:
    """Inside, the backward of linear layers, Megatron's local ones and Transformer Engine's, leaves weight gradients in
    `store`.

    All other gradients (norms, biases, embeddings) are cheap and are computed with the input gradients. So are those of
    an output layer whose logits are not kept.
    """
    modules = [module for chunk in chunks for module in chunk.modules() if keeps_logits(module)]
    with ExitStack() as undo:
        undo.enter_context(patched_on(modules, _deferring(store)))
        undo.enter_context(products_left_in(store, modules))
        return undo.pop_all()


def _deferring(store: WeightGradientStore) -> PatchTable:
    def left_in_store(linear: torch.nn.Module, forward: Any) -> Any:
        return deferring(forward, store)

    return tuple(
        Patch(
            f"megatron.core.tensor_parallel.layers.{kind}._forward_impl",
            left_in_store,
            "computes the weight gradient with the input gradient",
            wraps=True,
        )
        for kind in ("ColumnParallelLinear", "RowParallelLinear")
    )


def deferring(linear: Callable[..., Tensor], store: WeightGradientStore) -> Callable[..., Tensor]:
    """`linear`, the `_forward_impl` of a Megatron linear layer, with its weight gradient left in `store`.

    Only the product with the weight is split; the bias, cheap as it is, gets its gradient with the input. Where there
    is nothing to split (frozen weights, weights that are computed, inputs without a gradient) `linear` runs as it is.
    """

    def split(*, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        is_split = input.requires_grad and weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
        if not is_split or options.get("gtp_remat_size", 1) > 1:
            return linear(input=input, weight=weight, bias=bias, **options)
        tp_group = options.get("tp_group")
        group = tp_group if options["sequence_parallel"] else None

        def leave(input: Tensor, grad_output: Tensor) -> None:
            accumulate = options["gradient_accumulation_fusion"] and hasattr(weight, "main_grad")
            store.leave(Work((weight,), partial(_gradient, weight, input, grad_output, group, accumulate)))

        if options["allreduce_dgrad"]:
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


def _gathered(input: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tokens of all ranks of `group`, in a buffer that the next call reuses; `input` itself without a group."""
    if group is None:
        return input
    shape = [input.shape[0] * group.size(), *input.shape[1:]]
    whole = get_global_memory_buffer().get_tensor(shape, input.dtype, "mpu")
    dist.all_gather_into_tensor(whole, input.contiguous(), group=group)
    return whole
