"""Linear layers whose weight gradients come when, and where, a schedule with segments needs them."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from copy import copy
from functools import wraps
from typing import Any

import torch

from ..patches import Patch, PatchTable, Scope, patched_on
from .weight_gradient import WeightGradientStore, deferring
from .weight_gradient_te import products_left_in

# Linear layers inside a transformer layer name the buffer of their messages; output layers have none.
_OF_INNER_LAYERS = "tp_comm_buffer_name"


def defer_weight_gradients(store: WeightGradientStore, chunks: Iterable[torch.nn.Module]) -> ExitStack:
    """Inside, the backward of linear layers, Megatron's local ones and Transformer Engine's, leaves weight gradients in
    `store`.

    All other gradients (norms, biases, embeddings) are cheap and are computed with the input gradients.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    with ExitStack() as undo:
        undo.enter_context(patched_on(modules, _deferring(store)))
        undo.enter_context(products_left_in(store, modules))
        return undo.pop_all()


def _deferring(store: WeightGradientStore) -> PatchTable:
    def left_in_store(linear: torch.nn.Module, forward: Any) -> Any:
        return deferring(forward, store)

    return PatchTable(
        Scope.STEP,
        tuple(
            Patch(
                f"megatron.core.tensor_parallel.layers.{kind}._forward_impl",
                left_in_store,
                "computes the weight gradient with the input gradient",
                wraps=True,
            )
            for kind in ("ColumnParallelLinear", "RowParallelLinear")
        ),
    )


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


def without_apex(upstream: Callable[..., None]) -> Callable[..., None]:
    """``ColumnParallelLinear.__init__``, for a machine where apex's extension for fused weight gradients is missing.

    With gradient accumulation fusion, Transformer Engine's layers add to ``main_grad`` by themselves. The output layer
    is Megatron's own and would need the extension, without which it raises RuntimeError; here its weight gradient goes
    through autograd instead, and DDP adds it to ``main_grad``. All other layers keep upstream's behaviour.
    """

    @wraps(upstream)
    def init(self: Any, *args: Any, config: Any, **options: Any) -> None:
        if options.get(_OF_INNER_LAYERS) or not config.gradient_accumulation_fusion:
            return upstream(self, *args, config=config, **options)
        unfused = copy(config)
        unfused.gradient_accumulation_fusion = False
        upstream(self, *args, config=unfused, **options)
        self.config = config

    return init


def needs_output_layers_without_apex() -> bool:
    """Whether Transformer Engine is installed and the extension is not."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.tensor_parallel import layers

    return HAVE_TE and not layers._grad_accum_fusion_available
