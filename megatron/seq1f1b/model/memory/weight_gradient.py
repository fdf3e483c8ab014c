"""Weight gradients separate from input gradients, in Megatron's local linear layers and in Transformer Engine's.

Zero-bubble schedules (arXiv 2401.10241, section 2) compute them when a rank would be idle. One store takes the products
of all layers by unit, and gives their results to the parameters through autograd. The forward of a layer runs on
aliases of its parameters, which have no hooks. Transformer Engine's `delay_wgrad_compute` does not fit: its
`backward_dw` assigns a gradient instead of adding it, hooks of parameters fire at I, before there is a gradient, and
its queue does not separate units.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...process.patches import Patch, patched_on, wrapping
from .loss_pieces import computes_in_pieces
from .main_grad import accumulated

# Computes the gradients of parameters; None for a gradient that is already in `main_grad`.
Product = Callable[[], Sequence[Tensor | None]]


class WeightGradientStore:
    """Deferred weight gradients, by the unit whose backward deferred them. It holds inputs and output gradients of the
    unit's linear layers: b·n·(i + o)·e bytes for n tokens, b sequences, i and o features, e bytes an element."""

    def __init__(self) -> None:
        self.unit: Hashable = None  # the unit that runs
        self._deferred: defaultdict[Hashable, deque[Any]] = defaultdict(deque)

    def defer(self, parameters: Sequence[Tensor], product: Product) -> None:
        """Defer `product`, which computes the gradients of `parameters`."""
        assert self.unit is not None, "a split backward ran outside of a schedule"
        self._deferred[self.unit].append((product, *parameters))

    def compute(self, unit: Hashable) -> None:
        """Compute the weight gradients of `unit`, and free each product; autograd calls the hooks of the parameters."""
        deferred = self._deferred.pop(unit, ())
        while deferred:
            _WeightGradient.apply(*deferred.popleft()).backward()

    def clear(self) -> None:
        self._deferred.clear()

    def assert_empty(self) -> None:
        assert not self._deferred, f"the weight gradients of {len(self._deferred)} units outlived the step"


class _WeightGradient(torch.autograd.Function):
    """A scalar whose backward gives the gradients of parameters; autograd need not copy them."""

    @staticmethod
    def forward(ctx: Any, product: Product, *parameters: Tensor) -> Tensor:
        ctx.product = product
        return parameters[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        product = ctx.product
        del ctx.product
        return None, *product()


def defer_weight_gradients(store: WeightGradientStore, chunks: Iterable[torch.nn.Module]) -> ExitStack:
    """Inside, the backward of linear layers defers its weight gradients to `store`. Other gradients (norms, biases,
    embeddings) are cheap, and come with the input gradients, as do those of logits in pieces."""
    modules = [module for chunk in chunks for module in chunk.modules() if not computes_in_pieces(module)]
    rows = [
        Patch(
            f"megatron.core.tensor_parallel.layers.{kind}._forward_impl",
            lambda _, forward: deferring(forward, store),
            "computes the weight gradient with the input gradient",
            wraps=True,
        )
        for kind in ("ColumnParallelLinear", "RowParallelLinear")
    ]
    of_te = [module for module in modules if hasattr(module, "wgrad_store")]  # TE's attention has no weights
    if of_te:
        base = "transformer_engine.pytorch.module.base.TransformerEngineBaseModule"
        rows.append(Patch(f"{base}.wgrad_store", lambda layer, _: _store_of(layer, store), "mixes units", wraps=True))
        rows.append(wrapping(f"{base}.forward", partial(_on_aliases, store), "fires hooks too early"))
    local_ones = [module for module in modules if hasattr(module, "_forward_impl")]
    return patched_on([*local_ones, *of_te], rows)


def deferring(linear: Callable[..., Tensor], store: WeightGradientStore) -> Callable[..., Tensor]:
    """`linear`, the `_forward_impl` of a Megatron linear layer, with its weight gradient deferred to `store`; unchanged
    if there is nothing to split: frozen weights, computed weights, inputs without a gradient, a layer that the program
    calls by itself."""

    def split(*, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        is_split = input.requires_grad and weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
        is_split = is_split and store.unit is not None
        if not is_split or options.get("gtp_remat_size", 1) > 1:
            return linear(input=input, weight=weight, bias=bias, **options)
        kept = input.detach()  # without the graph, which is freed before the product is computed
        product_of = partial(_product_of_local_layer, weight, kept, options)
        # With these options, Megatron appends the output gradient to the buffer instead of computing the weight
        # gradient, and returns none, as if it had been added to `main_grad`.
        buffer = SimpleNamespace(append=lambda grad_output: store.defer([weight], partial(product_of, grad_output)))
        deferred = {"gradient_accumulation_fusion": True, "wgrad_deferral_limit": 0, "grad_output_buffer": buffer}
        # Detached, or autograd would fire the weight's hooks before its gradient exists.
        output = linear(input=input, weight=weight.detach().requires_grad_(), bias=None, **options | deferred)
        return output if bias is None else output + bias

    return split


def _product_of_local_layer(
    weight: Tensor, kept: Tensor, options: Mapping[str, Any], grad_output: Tensor
) -> tuple[Tensor | None]:
    """The gradient of the weight of a Megatron linear layer, by its input, which was `kept`, and its output gradient.
    `options` are those of its `_forward_impl`."""
    rows = kept
    if options["sequence_parallel"]:  # `kept` is this rank's part
        rows = gather_from_sequence_parallel_region(kept, group=options["tp_group"], use_global_buffer=True)
    grad_output, rows = prepare_input_tensors_for_wgrad_compute(grad_output, rows)
    if not (options["gradient_accumulation_fusion"] and hasattr(weight, "main_grad")):
        return (grad_output.t().matmul(rows),)
    kernels = layers.fused_weight_gradient_mlp_cuda  # Apex's
    in_fp32 = weight.main_grad.dtype is torch.float32
    kernel = kernels.wgrad_gemm_accum_fp32 if in_fp32 else kernels.wgrad_gemm_accum_fp16
    kernel(rows, grad_output, weight.main_grad)
    return (accumulated(weight),)


def _store_of(layer: Any, store: WeightGradientStore) -> SimpleNamespace:
    """Replaces the `wgrad_store` of a Transformer Engine layer."""

    def put(tensors: list[Any], product: Callable[..., tuple[Any, ...]]) -> None:
        """Called by the layer's backward: `product(*tensors)` returns the gradients of its weight and bias, or writes
        those of several experts' weights into the last of the `tensors`."""
        parameters = [layer._parameters[name] for name in _aliased(layer)]
        num_experts = getattr(layer, "num_gemms", 0)  # each has a weight of its own

        def gradients() -> list[Tensor | None]:
            of_weight, of_bias, *_ = product(*tensors)
            computed = tensors[2] if num_experts else [of_weight, of_bias]
            if layer.fuse_wgrad_accumulation and hasattr(parameters[0], "main_grad"):
                num_weights = num_experts or 1
                computed[:num_weights] = map(accumulated, parameters[:num_weights])
            return computed[: len(parameters)]

        store.defer(parameters, gradients)

    return SimpleNamespace(delay_wgrad_compute=lambda: store.unit is not None, put=put)


def _on_aliases(store: WeightGradientStore, layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the layer on parameters with the same values and the same `main_grad`, but without hooks; as it is if the
    program calls it by itself."""
    if store.unit is None:
        return forward(*args, **kwargs)
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
    """The parameters with gradients from the product: the weight, and the bias if the layer adds it itself."""
    if hasattr(layer, "num_gemms"):
        return [f"weight{expert}" for expert in range(layer.num_gemms)]
    names = list(layer.weight_names)
    adds_bias = layer.use_bias and layer.apply_bias and not layer.gemm_bias_unfused_add
    if adds_bias:
        names += layer.bias_names
    return names


def add_up_all_weight_gradients(chunks: Iterable[torch.nn.Module]) -> None:
    """Make Transformer Engine's layers add the gradient of every unit to `main_grad`. With
    `gradient_accumulation_fusion` they overwrite it with that of the unit that goes forward first, which in Megatron's
    schedules also goes backward first. In that unit they also convert the weights to 8 bits for the step."""
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "is_first_microbatch") and _as_any_unit not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_as_any_unit)


def _as_any_unit(layer: Any, _: tuple) -> None:
    """Unmark the first unit of a step, which Megatron marks; any unit then converts missing weights to 8 bits."""
    if layer.is_first_microbatch:
        layer.is_first_microbatch = False
        getattr(layer, "_fp8_workspaces", {}).clear()
