"""How the linear layers of a model give weight gradients where units go backward in another order than Megatron's."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from .weight_gradient import WeightGradientStore, deferring
from .weight_gradient_te import products_left_in


@contextmanager
def defer_weight_gradients(store: WeightGradientStore, chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, the backward of linear layers, Megatron's local ones and Transformer Engine's, leaves weight gradients in
    `store`.

    All other gradients (norms, biases, embeddings) are cheap and are computed with the input gradients.
    """
    chunks = list(chunks)
    kinds = ColumnParallelLinear, RowParallelLinear
    linears = [module for chunk in chunks for module in chunk.modules() if isinstance(module, kinds)]
    for linear in linears:
        linear._forward_impl = deferring(linear._forward_impl, store)
    with products_left_in(store, chunks):
        try:
            yield
        finally:
            for linear in linears:
                del linear._forward_impl


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
