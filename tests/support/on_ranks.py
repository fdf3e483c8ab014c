"""Tests that run on several ranks: forks of a process that has imported Megatron (see zygote.py); and which of them are
exhaustive."""

import functools
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path

import pytest
import torch.distributed as dist


def few_of(names: Iterable[object], few: Container[object]) -> list:
    """Parameters by name; those that are not among the `few` are exhaustive tests."""
    return [pytest.param(name, id=str(name), marks=() if name in few else pytest.mark.exhaustive) for name in names]


def on_ranks(number: int, *more: int) -> Callable:
    """Makes a test of a function that each of `number` ranks calls; with `more` ranks it is an exhaustive one."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def test(launch, ranks, **arguments):
            launch.call(ranks, function, **arguments)

        parameters = inspect.signature(function).parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        fixtures = [inspect.Parameter(name, kind) for name in ("launch", "ranks")]
        test.__signature__ = inspect.Signature([*fixtures, *(parameter.replace(kind=kind) for parameter in parameters)])
        return pytest.mark.parametrize("ranks", few_of((number, *more), [number]))(test)

    return decorate


if __name__ == "__main__":  # of a rank: FILE has the function and its arguments, and gets what it returns
    file = Path(sys.argv[1])
    module, name, arguments = pickle.loads(file.read_bytes())
    dist.init_process_group("gloo")
    result = inspect.unwrap(getattr(importlib.import_module(module), name))(**arguments)
    file.with_suffix(f".{dist.get_rank()}").write_bytes(pickle.dumps(result))
