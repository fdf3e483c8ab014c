"""Operators on tensors that have shapes and storages, but neither values nor memory: PyTorch's meta tensors.

A FakeTensorMode does the same in four times the time, most of it to find an operator in its cache.
"""

import math
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_META = torch.device("meta")
_MOST_INDICES = 2**12  # of a range that keeps its values: experts, not tokens
_CHANGE_STORAGE = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})


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


class _Effect(Enum):
    MAKES = "returns new tensors"
    WRITES = "returns its first argument, overwritten"
    OTHER = "returns views, numbers or nothing"


class _Form(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class ResultForms:
    """Runs operators on meta tensors: each one once for every form of its arguments.

    PyTorch works most forms out in Python, which takes ten times as long as the operator's own dispatch.
    """

    def __init__(self) -> None:
        # By operator and arguments; None where an operator must run every time.
        self._known: dict[tuple, list[_Form | None] | None] = {}

    def run(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What `function(*args, **kwargs)` returns, in storages of its own."""
        effect = _effect(function)
        if effect is _Effect.OTHER:
            return function(*args, **kwargs)
        key = function, _form_of(args), _form_of(tuple(kwargs.items()))
        if key not in self._known:
            return self._first_time(key, effect, function, args, kwargs)
        forms = self._known[key]
        if forms is None:
            return function(*args, **kwargs)
        if effect is _Effect.WRITES:
            return args[0]
        made = tuple(
            None if form is None else torch.empty_strided(*form[:2], dtype=form[2], device="meta") for form in forms
        )
        return made[0] if len(made) == 1 else made

    def _first_time(self, key: tuple, effect: _Effect, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        before = _form_of(args[:1])
        result = function(*args, **kwargs)
        if effect is _Effect.WRITES:
            forms = [] if result is args[0] and _form_of(args[:1]) == before else None
        else:
            results = result if isinstance(result, tuple) else (result,)
            used = {tensor.untyped_storage()._cdata for tensor in _tensors_in((*args, *kwargs.values()))}
            are_new = all(tensor is None or _is_alone(tensor, used) for tensor in results)
            forms = [None if tensor is None else _Form(*_form_of(tensor)) for tensor in results] if are_new else None
        self._known[key] = forms
        return result


@cache
def _effect(function: Any) -> _Effect:
    schema = function._schema
    written = [argument for argument in schema.arguments if argument.alias_info is not None]
    if not schema.returns or any(str(result.type) != "Tensor" for result in schema.returns):
        return _Effect.OTHER
    if not written and all(result.alias_info is None for result in schema.returns):
        return _Effect.MAKES
    of_first = schema.arguments[0].alias_info if schema.arguments else None
    if len(written) == len(schema.returns) == 1 and of_first is not None and of_first.is_write:
        return _Effect.OTHER if schema.name in _CHANGE_STORAGE else _Effect.WRITES
    return _Effect.OTHER


def _form_of(value: Any) -> Any:
    """Whatever the form of a result depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_form_of, value))
    return type(value), value


def _is_alone(tensor: Tensor, used: set[int]) -> bool:
    """Whether it fills a storage that none of the tensors before it has; adds the storage to these."""
    storage = tensor.untyped_storage()
    is_alone = storage._cdata not in used and storage.nbytes() == tensor.numel() * tensor.element_size()
    used.add(storage._cdata)
    return is_alone and tensor.is_meta


def _tensors_in(values: tuple | list) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors_in(value)
    return found
