"""Weight gradients of Transformer Engine's linear layers, computed apart from their input gradients.

With `delay_wgrad_compute` its layers hand the product that gives a weight gradient to their `wgrad_store`, where it
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
from typing import Any

import torch
from torch import Tensor

from ..patches import Patch, patched_on, wrapping
from .weight_gradient import WeightGradientStore, Work, accumulated


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
        parameters = tuple(layer._parameters[name] for name in aliased(layer))

        def gradients() -> tuple[Tensor | None, ...]:
            of_weight, of_bias, *_ = product(*tensors)
            computed = tensors[2] if _has_experts(layer) else [of_weight, of_bias]
            if layer.fuse_wgrad_accumulation and hasattr(parameters[0], "main_grad"):
                num_weights = len(parameters) if _has_experts(layer) else 1
                computed[:num_weights] = map(accumulated, parameters[:num_weights])
            return tuple(computed[: len(parameters)])

        self._store.leave(Work(parameters, gradients))


def aliased(layer: Any) -> list[str]:
    """The parameters whose gradients the product gives: the weight, and the bias where the layer adds it itself."""
    if _has_experts(layer):
        return [f"weight{expert}" for expert in range(layer.num_gemms)]
    adds_bias = layer.use_bias and layer.apply_bias and not layer.gemm_bias_unfused_add
    return [*layer.weight_names, *(layer.bias_names if adds_bias else ())]


def _has_experts(layer: Any) -> bool:
    """Whether it multiplies the tokens of each of several experts with a weight of its own."""
    return hasattr(layer, "num_gemms")


def products_left_in(store: WeightGradientStore, modules: Iterable[torch.nn.Module]) -> ExitStack:
    """Inside, the backward of Transformer Engine's linear layers leaves its weight gradients in `store`."""
    layers = [module for module in modules if hasattr(module, "wgrad_store")]
    if not layers:  # Transformer Engine may not be installed
        return ExitStack()
    with_biases = (layer for layer in layers if _has_experts(layer) and layer.use_bias and layer.apply_bias)
    assert not any(with_biases), "grouped products with biases are refused at start-up"

    def products(layer: Any, own: Any) -> _Products:
        return _Products(layer, store)

    base = "transformer_engine.pytorch.module.base.TransformerEngineBaseModule"
    rows = (
        Patch(f"{base}.wgrad_store", products, "assigns gradients, and does not keep units apart", wraps=True),
        wrapping(f"{base}.forward", _on_aliases, "lets hooks of parameters fire before there is a gradient"),
    )
    return patched_on(layers, rows)


def _on_aliases(layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    live = {name: layer._parameters[name] for name in aliased(layer)}
    layer._parameters.update({name: _alias(parameter) for name, parameter in live.items()})
    try:
        return forward(*args, **kwargs)
    finally:
        layer._parameters.update(live)


def _alias(parameter: torch.nn.Parameter) -> Tensor:
    """The same values and the same `main_grad`, without the hooks of the parameter."""
    alias = parameter.detach().requires_grad_(parameter.requires_grad)
    if hasattr(parameter, "main_grad"):
        alias.main_grad = parameter.main_grad  # type: ignore[attr-defined]
    return alias


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
