"""How the linear layers of a model give weight gradients where units go backward in another order than Megatron's."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from ..patches import Patch, PatchTable, Scope, patched_on
from .weight_gradient import WeightGradientStore, deferring
from .weight_gradient_te import products_left_in


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
    that goes forward first, which in Megatron's schedules goes backward first too. Without their cache of transposed
    weights, which saves nothing but in fp8, they do not look for that unit.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "disable_parameter_transpose_cache"):
                module.disable_parameter_transpose_cache = True
