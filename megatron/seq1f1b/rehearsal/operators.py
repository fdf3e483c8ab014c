"""Operators on PyTorch's meta tensors, which have shapes and storages, but neither values nor memory.

A FakeTensorMode does the same but takes four times as long, mostly to find an operator in its cache.

Tested in rehearsal/test_ledger.py.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_META = torch.device("meta")
_MOST_INDICES = 2**12  # of a range that keeps its values: experts, not tokens


class WithoutValues:
    """Runs an operator; its results have no values, unless all its inputs have some.

    A floating-point number that is read from a tensor without values is NaN, a truth value is False: so an optimizer
    finds no overflow and clips nothing. Reading a whole number raises ValueError, since sizes could follow from it.
    Tokens choose `topk` experts, each equally often: the sums of Megatron's boolean map [tokens, experts] have values.
    """

    def __init__(self, topk: int = 0, num_experts: int = 0) -> None:
        self._topk = topk
        self._num_experts = num_experts
        # Forms of results by operator and forms of its arguments: PyTorch takes ten times as long to work them out.
        self._results: dict[tuple, list] = {}
        self._runs_always: set[Any] = set()  # operators that return views, or one of their arguments

    def __call__(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function.namespace == "c10d":
            return _communicated(function, args)
        if self._num_experts and function is _aten.sum.dim_IntList and _is_map(args[0]) and args[1] == [0]:
            num_tokens, num_experts = args[0].shape
            return torch.tensor([self._before(expert, num_tokens) for expert in range(num_experts + 1)]).diff()
        if self._num_experts and function is _aten.masked_select.default and _is_map(args[1]):
            return args[0].new_empty(self._before(*args[1].shape))
        tensors = _tensors_in(args)
        without = any(tensor.is_meta for tensor in tensors)
        if not without and (tensors or _is_short_range(function, args)):
            return function(*args, **kwargs)
        if not all(tensor.is_meta for tensor in tensors):
            args = tree_map_only(Tensor, _without_value, args)
        if function is _aten._local_scalar_dense.default:
            dtype = args[0].dtype
            if not (dtype.is_floating_point or dtype is torch.bool):
                raise ValueError(f"a whole number is read from a tensor of {dtype}, but a rehearsal has no values")
            return math.nan if dtype.is_floating_point else False
        if function is _aten._to_copy.default and kwargs.get("device") and kwargs.get("dtype") in (None, args[0].dtype):
            return _aten.alias.default(args[0])  # to the host or back, which takes no memory of a GPU
        if _takes_device(function) and (not without or kwargs.get("device") is not None):
            kwargs = kwargs | {"device": _META, "pin_memory": None}
        return self._result(function, args, kwargs)

    def _result(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function in self._runs_always:
            return function(*args, **kwargs)
        key = function, _form_of(args), _form_of(tuple(kwargs.items()))
        if key in self._results:
            results = tuple(None if form is None else _made(*form) for form in self._results[key])
            return results[0] if len(results) == 1 else results
        result = function(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        if result is not None and all(item is None or _fills_new_storage(item, args) for item in results):
            self._results[key] = [None if item is None else _form_of(item) for item in results]
        else:
            self._runs_always.add(function)
        return result

    def _before(self, num_experts: int, num_tokens: int) -> int:
        """How often the first `num_experts` experts are chosen by `num_tokens` tokens."""
        return num_tokens * self._topk * num_experts // self._num_experts


def _is_short_range(function: Any, args: tuple) -> bool:
    return function.overloadpacket is _aten.arange and all(isinstance(x, int) and abs(x) <= _MOST_INDICES for x in args)


def _is_map(tensor: Tensor) -> bool:
    return tensor.is_meta and tensor.dtype is torch.bool and tensor.dim() == 2


def _communicated(function: Any, args: tuple) -> Any:
    """The return value of a collective, which writes its results to tensors among its arguments."""
    returns = function._schema.returns
    results = tuple(FakeWork().boxed() if "Work" in str(result.type) else args[0] for result in returns)
    return results[0] if len(results) == 1 else results


@cache
def _takes_device(function: Any) -> bool:
    return any(argument.name == "device" for argument in function._schema.arguments)


def _made(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=_META)


def _without_value(tensor: Tensor) -> Tensor:
    """A tensor of the same form without values."""
    return tensor if tensor.is_meta else _made(*_form_of(tensor))


def _form_of(value: Any) -> Any:
    """The size, strides and type of a tensor; types and values of all else."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_form_of, value))
    return type(value), value


def _fills_new_storage(item: Any, args: tuple) -> bool:
    if not isinstance(item, Tensor) or not item.is_meta:
        return False
    storage = item.untyped_storage()
    is_shared = any(other.untyped_storage()._cdata == storage._cdata for other in _tensors_in(args))
    return not is_shared and storage.nbytes() == item.numel() * item.element_size()


def _tensors_in(args: tuple) -> list[Tensor]:
    """The tensors among arguments, and in lists of tensors among these."""
    tensors = []
    for argument in args:
        items = argument if isinstance(argument, (list, tuple)) else (argument,)
        tensors += [item for item in items if isinstance(item, Tensor)]
    return tensors
