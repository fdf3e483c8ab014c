"""The forms of what operators return, remembered: PyTorch works most of them out in Python, which takes ten times as
long as the operator's own dispatch."""

from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHANGE_STORAGE = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})


class _Effect(Enum):
    MAKES = "returns new tensors"
    WRITES = "returns its first argument, overwritten"
    OTHER = "returns views, numbers or nothing"


class _Form(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class ResultForms:
    """Runs operators on meta tensors: each one once for every form of its arguments."""

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
