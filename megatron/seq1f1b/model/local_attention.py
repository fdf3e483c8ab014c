"""Megatron's local attention in models whose context-parallel ranks share heads, where ours takes its place."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..patches import Patch, PatchTable, Scope


def _built(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def built(attention: Any, config: Any, *args: Any, **options: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            init(attention, config, *args, **options)
        finally:
            config.context_parallel_size = size

    return built


def _not_run(forward: Callable) -> Callable:
    @wraps(forward)
    def not_run(attention: Any, *args: Any, **options: Any) -> Any:
        if attention.config.context_parallel_size > 1:
            raise ValueError(
                "Megatron's local attention does not see the keys of other context-parallel ranks; give --cp-comm-type "
                "a2a or all_gather and no --attention-backend local"
            )
        return forward(attention, *args, **options)

    return not_run


_LOCAL = "megatron.core.transformer.dot_product_attention.DotProductAttention"

LOCAL_ATTENTION = PatchTable(
    Scope.INSTALLED,
    (
        Patch(f"{_LOCAL}.__init__", _built, "refuses context parallelism before ours takes its place", wraps=True),
        Patch(f"{_LOCAL}.forward", _not_run, "would attend to the keys of one rank where ours does not", wraps=True),
    ),
)
