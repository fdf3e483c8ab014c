"""Repairs of Megatron where Transformer Engine or NVIDIA apex is missing: its local layers, torch's Adam."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..process.megatron_versions import checks_for_inference_layers
from ..process.patches import Patch, PatchTable, wrapping


def repairs() -> PatchTable:
    """The repairs for the packages that are missing here. Imports Megatron."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import layers

    rows: PatchTable = LOCAL_LAYERS
    if not HAVE_TE:
        rows += RECOMPUTATION
        rows += tuple(Patch(name, _no, _NO_INFERENCE) for name in checks_for_inference_layers())
    elif not layers._grad_accum_fusion_available:
        rows += OUTPUT_LAYER
    return rows if distrib_optimizer.HAVE_APEX_OR_TE else rows + TORCH_ADAM


def _no(*_: Any) -> bool:
    return False


class LayerNormAroundOne(torch.nn.LayerNorm):
    """A layer norm that multiplies by 1 + `weight`."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class RMSNormAroundOne(torch.nn.RMSNorm):
    """An RMS norm that multiplies by 1 + `weight`."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


_AROUND_ONE = {"LayerNorm": LayerNormAroundOne, "RMSNorm": RMSNormAroundOne}


def _local_norm(
    new: Callable, cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
) -> torch.nn.Module:
    """A norm with marked parameters: Megatron sums their gradients over the tensor-parallel ranks. Its weights are
    those of --apply-layernorm-1p if that is given."""
    if config.layernorm_zero_centered_gamma and config.normalization in _AROUND_ONE:
        norm = _AROUND_ONE[config.normalization](hidden_size, eps=eps)
    else:
        norm = new(cls, _with(config, sequence_parallel=False), hidden_size, eps, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _made_for_any_rank(
    init: Callable, attention: Any, config: Any, *args: Any, v_channels: int = 0, **options: Any
) -> None:
    options.pop("k_channels", None)
    init(attention, _with(config, context_parallel_size=1), *args, **options)
    attention.config = config
    if v_channels:
        attention.hidden_size_per_partition = attention.num_attention_heads_per_partition * v_channels


def _on_one_rank(forward: Callable[..., Any], attention: Any, *args: Any, **kwargs: Any) -> Any:
    if attention.config.context_parallel_size > 1:
        raise ValueError(
            "Megatron's local attention does not read the keys of other context-parallel ranks; give --cp-comm-type "
            "a2a or all_gather and no --attention-backend local"
        )
    return forward(attention, *args, **kwargs)


def _with(config: Any, **changes: Any) -> Any:
    """A copy of the configuration with these changes."""
    changed = copy(config)
    vars(changed).update(changes)
    return changed


def _without_apex(init: Callable, layer: Any, *args: Any, config: Any, **options: Any) -> None:
    """With gradient accumulation fusion, Transformer Engine's layers add to `main_grad` by themselves. Megatron's own
    output layer would need apex's extension; here autograd makes its weight gradient, and DDP adds it."""
    # Layers inside a transformer layer name the buffer of their messages; they still need the extension.
    if options.get("tp_comm_buffer_name") or not config.gradient_accumulation_fusion:
        return init(layer, *args, config=config, **options)
    init(layer, *args, config=_with(config, gradient_accumulation_fusion=False), **options)
    layer.config = config


def _state_dict_before_first_step(state_dict: Callable, self: Any, *args: Any, **options: Any) -> dict:
    """Megatron reads the number of steps from states that do not exist before a checkpoint is loaded."""
    inner = self.optimizer
    parameters = [p for group in inner.param_groups for p in group["params"]]
    if inner.state or not parameters:
        return state_dict(self, *args, **options)
    inner.state[parameters[0]] = {"step": torch.tensor(0.0)}
    try:
        return state_dict(self, *args, **options)
    finally:
        inner.state.clear()


@torch.no_grad()
def _load_with_steps(load_state_dict: Callable, self: Any, *args: Any, **options: Any) -> None:
    """Megatron gives all parameters of a group one tensor with the number of steps, which Adam increments in place for
    each of them. Only `no_grad` allows writing to fp32 parameters, which are their own main copies."""
    load_state_dict(self, *args, **options)
    for state in self.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


def _set_states_without_step(
    set_states: Callable, self: Any, model_param: Tensor, tensors: dict, *args: Any, **options: Any
) -> None:
    set_states(self, model_param, {**tensors, "step": None}, *args, **options)


_CORE = "megatron.core"
_NO_INFERENCE = "compares layers with classes of Transformer Engine, which are no classes without it"
_PARALLEL = f"{_CORE}.tensor_parallel"
_ATTENTION = f"{_CORE}.transformer.dot_product_attention.DotProductAttention"
_OPTIMIZER = f"{_CORE}.optimizer.distrib_optimizer.DistributedOptimizer"

LOCAL_LAYERS = (
    wrapping(
        f"{_CORE}.transformer.torch_norm.WrappedTorchNorm.__new__",
        _local_norm,
        "refuses sequence parallelism, and --apply-layernorm-1p",
    ),
    wrapping(
        f"{_ATTENTION}.__init__",
        _made_for_any_rank,
        "refuses context parallelism before ours takes its place, and the head sizes of multi-latent attention",
    ),
    wrapping(f"{_ATTENTION}.forward", _on_one_rank, "would attend to the keys of one rank only"),
)
RECOMPUTATION = (
    wrapping(
        f"{_PARALLEL}.random.CheckpointWithoutOutput.__init__",  # of a recomputed part of a layer, such as its norm
        lambda init, checkpoint, fp8=None, *rest, **options: init(checkpoint, None, *rest, **options),
        "looks for fp8 in Transformer Engine",
    ),
)
OUTPUT_LAYER = (
    wrapping(f"{_PARALLEL}.layers.ColumnParallelLinear.__init__", _without_apex, "requires apex for the output layer"),
)
TORCH_ADAM = (
    wrapping(f"{_OPTIMIZER}.state_dict", _state_dict_before_first_step, "asserts a number of steps that is missing"),
    wrapping(f"{_OPTIMIZER}.load_state_dict", _load_with_steps, "lets parameters share one counter of steps"),
    wrapping(
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
        _set_states_without_step,
        "copies into every tensor of a parameter's state, but a checkpoint has no number of steps for each parameter",
    ),
)
