"""The marks of tests of a framework, which run in an environment of its own."""

from importlib.util import find_spec

import pytest


def of_framework(title: str, name: str, package: str) -> list[pytest.MarkDecorator]:
    """For tests that run where `bash scripts/frameworks.sh NAME` has installed the `package` of a framework."""
    reason = f"{title} is not installed here: bash scripts/frameworks.sh {name}"
    return [
        pytest.mark.exhaustive,
        pytest.mark.timeout(1800),
        pytest.mark.skipif(find_spec(package) is None, reason=reason),
    ]
