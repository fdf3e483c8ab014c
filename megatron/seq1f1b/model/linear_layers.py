"""Linear layers with their weight gradients apart: Megatron's local ones, and Transformer Engine's.

With `delay_wgrad_compute` the latter hand the product that gives a weight gradient to their `wgrad_store`, where it
waits for `backward_dw()`. Three properties do not fit a schedule with I and W:

- `backward_dw` assigns the gradient instead of adding it, so the units of a step would overwrite one another.
- The backward that leaves the product still goes to the live parameter, so that hooks there fire at I, before there is
  a gradient (Megatron's DistributedDataParallel would reduce it).
- Their queue does not separate units, so an order of W other than that of I would mix them.

So the products go to our own store instead, which keeps them by unit and hands their results to the live parameters
through autograd, and the forward of a layer runs on aliases of its parameters, which have no hooks.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch import Tensor

from ..patches import Patch, patched_on, wrapping
from .loss_pieces import keeps_logits
from .weight_gradient import WeightGradientStore, accumulated


def defer_weight_gradients(store: WeightGradientStore, chunks: Iterable[torch.nn.Module]) -> ExitStack:
    """Inside, the backward of linear layers, Megatron's local ones and Transformer Engine's, leaves weight gradients in
    `store`.

    All other gradients (norms, biases, embeddings) are cheap and are computed with the input gradients. So are those of
    an output layer whose logits are not kept.
    """
    modules = [module for chunk in chunks for module in chunk.modules() if keeps_logits(module)]
    local = [
        Patch(
            f"megatron.core.tensor_parallel.layers.{kind}._forward_impl",
            lambda _, forward: deferring(forward, store),
            "computes the weight gradient with the input gradient",
            wraps=True,
        )
        for kind in ("ColumnParallelLinear", "RowParallelLinear")
    ]
    with ExitStack() as undo:
        undo.enter_context(patched_on(modules, local))
        undo.enter_context(products_left_in(store, modules))
        return undo.pop_all()


def deferring(linear: Callable[..., Tensor], store: WeightGradientStore) -> Callable[..., Tensor]:
    """`linear`, the `_forward_impl` of a Megatron linear layer, with its weight gradient left in `store`.

    Only the product with the weight is split; the bias, cheap as it is, gets its gradient with the input. Where there
    is nothing to split (frozen weights, weights that are computed, inputs without a gradient) `linear` runs as it is.
    """

    def split(*, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        is_split = input.requires_grad and weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
        if not is_split or options.get("gtp_remat_size", 1) > 1:
            return linear(input=input, weight=weight, bias=bias, **options)
        kept = input.detach()  # whose graph ends before the product is computed
        group = options["tp_group"] if options["sequence_parallel"] else None
        accumulates = options["gradient_accumulation_fusion"] and hasattr(weight, "main_grad")

        def leave(grad_output: Tensor) -> None:
            store.leave([weight], partial(_gradient, weight, kept, grad_output, group, accumulates))

        # Megatron gives the output gradient to such a buffer instead of computing the weight's, and returns none for a
        # weight whose gradient is to be added to `main_grad`.
        options |= {
            "gradient_accumulation_fusion": True,
            "grad_output_buffer": SimpleNamespace(append=leave),
            "wgrad_deferral_limit": 0,
        }
        # Of the weight itself, autograd would call the hooks before its gradient exists.
        output = linear(input=input, weight=weight.detach().requires_grad_(), bias=None, **options)
        return output if bias is None else output + bias

    return split


def _gradient(
    weight: torch.nn.Parameter,
    input: Tensor,
    grad_output: Tensor,
    gather_group: dist.ProcessGroup | None,
    accumulates: bool,
) -> tuple[Tensor | None]:
    """The gradient of a weight [o, i], from its input [n, b, i] and output gradient [n', b, o].

    With `gather_group` the n tokens of the input are this rank's part of the n' (sequence parallelism). It is added to
    the weight's `main_grad` by Apex's kernel if it `accumulates` there.
    """
    if gather_group is not None:
        input = gather_from_sequence_parallel_region(input, group=gather_group, use_global_buffer=True)
    grad_output, input = prepare_input_tensors_for_wgrad_compute(grad_output, input)
    if not accumulates:
        return (grad_output.t().matmul(input),)
    kernels = layers.fused_weight_gradient_mlp_cuda
    in_fp32 = weight.main_grad.dtype is torch.float32
    kernel = kernels.wgrad_gemm_accum_fp32 if in_fp32 else kernels.wgrad_gemm_accum_fp16
    kernel(input, grad_output, weight.main_grad)
    return (accumulated(weight),)


class _Products:
    """Takes the place of the `wgrad_store` of one layer."""

    def __init__(self, layer: Any, store: WeightGradientStore) -> None:
        self._layer = layer
        self._store = store

    def delay_wgrad_compute(self) -> bool:
        return True

    def put(self, tensors: list[Any], product: Callable[..., tuple[Any, ...]]) -> None:
        """Called by the layer's backward: `product(*tensors)` gives the gradients of its weight and of its bias.

        Where the layer is for several experts it writes the gradients of their weights into the last of the `tensors`.
        """
        layer = self._layer
        parameters = [layer._parameters[name] for name in _aliased(layer)]

        def gradients() -> list[Tensor | None]:
            of_weight, of_bias, *_ = product(*tensors)
            computed = tensors[2] if _has_experts(layer) else [of_weight, of_bias]
            if layer.fuse_wgrad_accumulation and hasattr(parameters[0], "main_grad"):
                num_weights = len(parameters) if _has_experts(layer) else 1
                computed[:num_weights] = map(accumulated, parameters[:num_weights])
            return computed[: len(parameters)]

        self._store.leave(parameters, gradients)


def products_left_in(store: WeightGradientStore, modules: Iterable[torch.nn.Module]) -> ExitStack:
    """Inside, the backward of Transformer Engine's linear layers leaves its weight gradients in `store`."""
    layers = [module for module in modules if hasattr(module, "wgrad_store")]
    if not layers:  # Transformer Engine may not be installed
        return ExitStack()
    with_biases = (layer for layer in layers if _has_experts(layer) and layer.use_bias and layer.apply_bias)
    assert not any(with_biases), "grouped products with biases are refused at start-up"
    base, reason = "transformer_engine.pytorch.module.base.TransformerEngineBaseModule", "does not keep units apart"
    rows = (
        Patch(f"{base}.wgrad_store", lambda layer, _: _Products(layer, store), reason, wraps=True),
        wrapping(f"{base}.forward", _on_aliases, "lets hooks of parameters fire before there is a gradient"),
    )
    return patched_on(layers, rows)


def _on_aliases(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Parameters with the same values and the same `main_grad`, without hooks, take the place of the layer's own."""
    live = {name: layer._parameters[name] for name in _aliased(layer)}
    for name, parameter in live.items():
        layer._parameters[name] = alias = parameter.detach().requires_grad_(parameter.requires_grad)
        if hasattr(parameter, "main_grad"):
            alias.main_grad = parameter.main_grad
    try:
        return forward(*args, **kwargs)
    finally:
        layer._parameters.update(live)


def _aliased(layer: Any) -> list[str]:
    """The parameters whose gradients the product gives: the weight, and the bias where the layer adds it itself."""
    if _has_experts(layer):
        return [f"weight{expert}" for expert in range(layer.num_gemms)]
    adds_bias = layer.use_bias and layer.apply_bias and not layer.gemm_bias_unfused_add
    return [*layer.weight_names, *(layer.bias_names if adds_bias else ())]


def _has_experts(layer: Any) -> bool:
    """Whether it multiplies the tokens of each of several experts with a weight of its own."""
    return hasattr(layer, "num_gemms")


def add_up_all_weight_gradients(chunks: Iterable[torch.nn.Module]) -> None:
    """Let Transformer Engine's layers add the gradient of every unit to `main_grad`.

    Where they write to it themselves (`gradient_accumulation_fusion`), they overwrite it with the gradient of the unit
    that goes forward first, which in Megatron's schedules goes backward first too. That unit also puts the weights into
    8 bits, for all units of the step; here it does no more than that.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "is_first_microbatch") and _as_any_unit not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_as_any_unit)


def _as_any_unit(layer: Any, _: tuple) -> None:
    """Megatron marks the first unit of a step. Weights in 8 bits that are not there are made, and kept, in any unit."""
    if layer.is_first_microbatch:
        layer.is_first_microbatch = False
        getattr(layer, "_fp8_workspaces", {}).clear()
