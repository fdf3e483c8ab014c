"""The output layer of a model of Transformer Engine's layers on a machine without NVIDIA apex."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any

# Linear layers inside a transformer layer name the buffer of their messages; output layers have none.
_OF_INNER_LAYERS = "tp_comm_buffer_name"


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
