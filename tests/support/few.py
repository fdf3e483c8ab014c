"""Matrices of which a few cases are functional tests, and the rest exhaustive ones."""

from collections.abc import Container, Iterable

import pytest


def few_of(names: Iterable[str], few: Container[str]) -> list:
    """Parameters by name; those that are not among the `few` are marked."""
    return [pytest.param(name, id=name, marks=() if name in few else pytest.mark.exhaustive) for name in names]
