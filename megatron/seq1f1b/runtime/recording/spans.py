"""Names the actions of a step in the PyTorch profiler, and in OpenTelemetry by NVIDIA's nemo-lens."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

# Megatron's group of spans for the forwards and backwards of micro-batches: --otel-span-groups.
_GROUP = "microbatch"


def around_actions() -> Callable[[str], AbstractContextManager[Any]] | None:
    """A function from the name of an action to the context in which it runs; None if nobody listens, which costs a step
    nothing.

    The context is a range in the profiler (in Nsight with Megatron's --profile, too), or a span where a Megatron that
    makes spans has imported nemo-lens and its group is on. Both tell when the host issued the action; a GPU runs it
    later.
    """
    if torch.autograd._profiler_enabled():
        return record_function
    helpers = sys.modules.get("nemo.lens.helpers")
    state = sys.modules.get("nemo.lens.state")
    if helpers is not None and state is not None and state.is_span_group_enabled(_GROUP):
        return partial(helpers.managed_span, _GROUP)
    return None
