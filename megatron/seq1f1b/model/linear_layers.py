"""Weight gradients apart from input gradients, in Megatron's local linear layers and in Transformer Engine's.

With `delay_wgrad_compute`, Transformer Engine's layers put the product that gives a weight gradient into their
`wgrad_store`, where it waits for `backward_dw()`. That does not fit a schedule with I and W in three ways:

- `backward_dw` assigns the gradient instead of adding it, so the units of a step would overwrite one another.
- The backward that leaves the product still reaches the parameter, so its hooks fire at I, before there is a gradient
  (Megatron's DistributedDataParallel would reduce it).
- Their queue does not separate units, so an order of W other than that of I would mix them.

So our own store takes the products. It keeps them by unit and gives their results to the parameters through autograd.
The forward of a layer runs on aliases of its parameters, which have no hooks.
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

from ..process.patches import Patch, patched_on, wrapping
from .loss_pieces import keeps_logits
from .weight_gradient import WeightGradientStore, accumulated


def defer_weight_gradients(store: WeightGradientStore, chunks: Iterable[torch.nn.Module]) -> ExitStack:
    """Inside, the backward of linear layers leaves weight gradients in `store`.

    All other gradients (norms, biases, embeddings) are cheap and are computed with the input gradients, as are those of
    an output layer that computes its logits in pieces.
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
    # Not all modules of Transformer Engine: attention has no weights.
    layers_of_te = [module for module in modules if hasattr(module, "wgrad_store")]
    rows: list[Patch] = []
    if layers_of_te:
        biased = (each for each in layers_of_te if _has_experts(each) and each.use_bias and each.apply_bias)
        assert not any(biased), "grouped products with biases are refused at start-up"
        base, reason = "transformer_engine.pytorch.module.base.TransformerEngineBaseModule", "does not separate units"
        rows = [
            Patch(f"{base}.wgrad_store", lambda layer, _: _Products(layer, store), reason, wraps=True),
            wrapping(f"{base}.forward", _on_aliases, "fires hooks of parameters before there is a gradient"),
        ]
    with ExitStack() as undo:
        undo.enter_context(patched_on(modules, local))
        undo.enter_context(patched_on(layers_of_te, rows))
        return undo.pop_all()


def deferring(linear: Callable[..., Tensor], store: WeightGradientStore) -> Callable[..., Tensor]:
    """`linear`, the `_forward_impl` of a Megatron linear layer, with its weight gradient left in `store`.

    Only the product with the weight is split; the gradient of the bias is cheap. `linear` runs unchanged if there is
    nothing to split: frozen weights, computed weights, inputs without a gradient.
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

        # With these, Megatron appends the output gradient to the buffer instead of computing the weight gradient, and
        # returns none, as if it had been added to `main_grad`.
        options |= {
            "gradient_accumulation_fusion": True,
            "grad_output_buffer": SimpleNamespace(append=leave),
            "wgrad_deferral_limit": 0,
        }
        # Detached, or autograd would fire the weight's hooks before its gradient exists.
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

    With `gather_group`, the n tokens of the input are this rank's part of the n' (sequence parallelism). If it
    `accumulates`, Apex's kernel adds it to the weight's `main_grad`.
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
    """Replaces the `wgrad_store` of one layer."""

    def __init__(self, layer: Any, store: WeightGradientStore) -> None:
        self._layer = layer
        self._store = store

    def delay_wgrad_compute(self) -> bool:
        return True

    def put(self, tensors: list[Any], product: Callable[..., tuple[Any, ...]]) -> None:
        """Called by the layer's backward: `product(*tensors)` gives the gradients of its weight and of its bias.

        In a layer of several experts it writes the gradients of their weights into the last of the `tensors`.
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


def _on_aliases(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the layer on parameters with the same values and the same `main_grad`, but without hooks."""
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
    """The parameters whose gradients the product gives: the weight, and the bias if the layer adds it itself."""
    if _has_experts(layer):
        return [f"weight{expert}" for expert in range(layer.num_gemms)]
    adds_bias = layer.use_bias and layer.apply_bias and not layer.gemm_bias_unfused_add
    return [*layer.weight_names, *(layer.bias_names if adds_bias else ())]


def _has_experts(layer: Any) -> bool:
    """Whether the layer multiplies the tokens of each expert with a weight of its own."""
    return hasattr(layer, "num_gemms")


def add_up_all_weight_gradients(chunks: Iterable[torch.nn.Module]) -> None:
    """Make Transformer Engine's layers add the gradient of every unit to `main_grad`.

    With `gradient_accumulation_fusion` they overwrite it with the gradient of the unit that goes forward first, which
    in Megatron's schedules also goes backward first. That unit also puts the weights into 8 bits, for all units of the
    step; here it only does that.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "is_first_microbatch") and _as_any_unit not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_as_any_unit)


def _as_any_unit(layer: Any, _: tuple) -> None:
    """Unmark the first unit of a step, which Megatron marks; any unit makes, and keeps, missing weights in 8 bits."""
    if layer.is_first_microbatch:
        layer.is_first_microbatch = False
        getattr(layer, "_fp8_workspaces", {}).clear()
