"""Patches, the form of every change to Megatron: a target, its replacement, a reason, and a way to undo it.

A table is applied on modules and classes, or on objects: `patched_on(model.modules(), TABLE)` binds a patch of
`TopKRouter.routing` on each router among them and leaves the class alone. Both return an ExitStack that undoes it.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """The dotted name `target` is bound to `new`, or to `new(old)` if it wraps the old value.

    On an object a wrapping patch is called as `new(object, old)`, with `old` the bound method.
    """

    target: str
    new: Any
    reason: str
    wraps: bool = False


def wrapping(target: str, function: Callable[..., Any], reason: str) -> Patch:
    """Calls of the target become `function(old, ...)`, or `function(object, old, ...)` if it is patched on objects."""

    def wrap(*bound: Any) -> Callable[..., Any]:
        @wraps(bound[-1])
        def call(*args: Any, **options: Any) -> Any:
            return function(*bound, *args, **options)

        return call

    return Patch(target, wrap, reason, wraps=True)


PatchTable = tuple[Patch, ...]


def patched(table: Iterable[Patch]) -> ExitStack:
    """Bind every target of the table in its module or class; raises AttributeError for a missing name. Earlier ones are
    bound before a target is looked up, since importing its module may use them."""
    return _bound(_Binding(owner_of(patch.target)[0], patch) for patch in table)


def patched_on(objects: Iterable[Any], table: Iterable[Patch]) -> ExitStack:
    """Bind every target of the table on each of the `objects` of its class; raises AttributeError for a missing one."""
    objects = list(objects)
    kinds = [(owner_of(patch.target)[0], patch) for patch in table]
    return _bound(
        _Binding(instance, patch, is_on_object=True)
        for kind, patch in kinds
        for instance in objects
        if isinstance(instance, kind)
    )


def patched_in(classes: Iterable[type], patch: Patch) -> ExitStack:
    """Bind the target of the patch in each of these classes, which derive from that of the target or look like it."""
    return _bound(_Binding(owner, patch) for owner in classes)


def rebound(old: Any, new: Any) -> ExitStack:
    """Bind every name in loaded modules that refers to `old`, by an earlier `from ... import`, to `new`."""
    # They never refer to Megatron, and are the majority of modules.
    unrelated = sys.stdlib_module_names | {"torch"}
    modules = [module for path, module in sys.modules.items() if path.partition(".")[0] not in unrelated]
    with ExitStack() as undo:
        for module in modules:
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is old:
                    undo.callback(setattr, module, name, old)
                    setattr(module, name, new)
        return undo.pop_all()


def owner_of(target: str) -> tuple[Any, str]:
    """The module or class that the last part of the dotted name belongs to, and that part."""
    *path, name = target.split(".")
    owner: Any = importlib.import_module(path[0])
    for depth, part in enumerate(path[1:], start=2):
        if not hasattr(owner, part):
            importlib.import_module(".".join(path[:depth]))
        owner = getattr(owner, part)
    return owner, name


class _Binding(NamedTuple):
    """A patch, and the module, class or object in which its name is bound."""

    owner: Any
    patch: Patch
    is_on_object: bool = False


def _bound(bindings: Iterable[_Binding]) -> ExitStack:
    with ExitStack() as undo:
        for owner, patch, is_on_object in bindings:
            target = patch.target
            new = patch.new
            name = target.rpartition(".")[2]
            if not hasattr(owner, name):
                raise AttributeError(f"cannot patch {target}: it does not exist in this version of Megatron or torch")
            old = getattr(owner, name)
            own = {**vars(owner).get("_modules", {}), **vars(owner)}
            if name in own:
                undo.callback(setattr, owner, name, own[name])  # not `old`, which getattr may have bound
            else:
                undo.callback(delattr, owner, name)
            if patch.wraps:
                new = new(owner, old) if is_on_object else new(old)
            setattr(owner, name, new)
        return undo.pop_all()
