"""Runs operators on tensors that have shapes and storages, but neither values nor memory: PyTorch's meta tensors.

A FakeTensorMode does the same, but it takes four times as long, most of it to find an operator in its cache.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_map_only

from .result_forms import ResultForms

_aten = torch.ops.aten
_META = torch.device("meta")
_MOST_INDICES = 2**12  # of a range that keeps its values: experts, not tokens


class NeedsValues(Exception):
    """Shapes of the launch follow from values of tensors."""


class WithoutValues:
    """Runs an operator; what it makes has no values, unless all its inputs have some.

    A number that is read from a tensor without values is not a number, a truth value is False. So an optimizer finds
    no overflow and clips nothing. Whole numbers stay unknown, since sizes could follow from them.
    """

    def __init__(self) -> None:
        self._results = ResultForms()

    def __call__(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function.namespace == "c10d":
            return _communicated(function, args)
        with_values = without = False
        for argument in args:
            for item in argument if isinstance(argument, (list, tuple)) else (argument,):
                if isinstance(item, Tensor):
                    if item.is_meta:
                        without = True
                    else:
                        with_values = True
        if with_values and not without:
            return function(*args, **kwargs)
        if with_values:
            args = tree_map_only(Tensor, _shape_of, args)
        if not without and function.overloadpacket is _aten.arange and _is_short(args):
            return function(*args, **kwargs)
        if function is _aten._local_scalar_dense.default:
            return _unknown(args[0])
        if function is _aten._to_copy.default and _only_moves(args[0], kwargs):
            return _aten.alias.default(args[0])
        if _takes_device(function) and (not without or kwargs.get("device") is not None):
            kwargs = kwargs | {"device": _META, "pin_memory": None}
        return self._results.run(function, args, kwargs)


def _unknown(tensor: Tensor) -> Any:
    if tensor.dtype.is_floating_point:
        return math.nan
    if tensor.dtype is torch.bool:
        return False
    raise NeedsValues(f"a whole number is read from a tensor of {tensor.dtype}")


def _communicated(function: Any, args: tuple) -> Any:
    """What a collective returns, whose results are in tensors that were given to it."""
    results = tuple(FakeWork().boxed() if is_work else args[0] for is_work in _returns_work(function))
    return results[0] if len(results) == 1 else results


@cache
def _returns_work(function: Any) -> tuple[bool, ...]:
    return tuple("Work" in str(result.type) for result in function._schema.returns)


@cache
def _takes_device(function: Any) -> bool:
    return any(argument.name == "device" for argument in function._schema.arguments)


def _only_moves(tensor: Tensor, options: dict[str, Any]) -> bool:
    """To the host or back, which takes no memory of a GPU."""
    return options.get("device") is not None and options.get("dtype") in (None, tensor.dtype)


def _shape_of(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _is_short(bounds: tuple) -> bool:
    return all(isinstance(bound, int) and abs(bound) <= _MOST_INDICES for bound in bounds)
