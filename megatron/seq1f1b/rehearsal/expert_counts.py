"""How many tokens each expert gets: the only values of a model that shapes follow from."""

from typing import Any

import torch

from .without_values import WithoutValues

_aten = torch.ops.aten


class ExpertCounts:
    """Runs operators as `WithoutValues`, but every expert gets the same share of all tokens, `topk` of
    `num_experts` for each token.

    Megatron counts by summing a map of booleans [tokens, experts]. Here these sums have values, and so has what is
    computed from them alone.
    """

    def __init__(self, topk: int, num_experts: int) -> None:
        self._topk, self._num_experts = topk, num_experts
        self._run = WithoutValues()

    def __call__(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function is _aten.sum.dim_IntList and _is_map(args[0]) and args[1] == [0]:
            num_tokens, num_experts = args[0].shape
            return torch.tensor([self._before(expert, num_tokens) for expert in range(num_experts + 1)]).diff()
        if function is _aten.masked_select.default and _is_map(args[1]):
            num_experts, num_tokens = args[1].shape
            return args[0].new_empty(self._before(num_experts, num_tokens))
        return self._run(function, args, kwargs)

    def _before(self, num_experts: int, num_tokens: int) -> int:
        """How often the first `num_experts` experts are chosen by `num_tokens` tokens."""
        return num_tokens * self._topk * num_experts // self._num_experts


def _is_map(tensor: torch.Tensor) -> bool:
    return tensor.is_meta and tensor.dtype is torch.bool and tensor.dim() == 2
