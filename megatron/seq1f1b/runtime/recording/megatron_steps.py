"""Steps by Megatron's own schedules, recorded like those of ours.

Tested in functional_tests/test_quickstart.py by test_quick_start_trains_twice_and_compares.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megatron.core import parallel_state

from ...process.patches import patched, wrapping
from ...schedule import Action, Kind, Placement, Shape
from .recorder import StepRecorder
from .tracer import StepTracer


def run_traced(function: Callable, tracer: StepTracer, **options: Any) -> Any:
    """A step by `function`, one of Megatron's own schedules, recorded like one of ours."""
    if options.get("forward_only"):
        return function(**options)
    chunks = options["model"] if isinstance(options["model"], list) else [options["model"]]
    group = parallel_state.get_pipeline_model_parallel_group()
    placement = Placement(group.size(), len(chunks))
    name = "Megatron's interleaved 1F1B" if len(chunks) > 1 else "Megatron's 1F1B"
    recording = tracer.step(name, Shape(placement, options["num_microbatches"]), chunks, group)
    with recording as recorder, actions_timed(recorder, placement, group.rank()):
        return function(**options)


def actions_timed(recorder: StepRecorder, placement: Placement, rank: int) -> ExitStack:
    """Inside, forwards and backwards of Megatron's own schedules are recorded as F and B of whole sequences."""
    running: dict[int, Action] = {}

    def identity(output: Any) -> int:
        if isinstance(output, list):  # Megatron passes outputs bare, or as lists of one
            output = output[0]
        return id(output)

    def forward(upstream: Callable, *args: Any, current_microbatch: int, **options: Any) -> Any:
        stage = placement.stage_of(rank, options.get("vp_stage") or 0)
        action = Action(Kind.F, stage, current_microbatch, 0)
        with recorder.span(action):
            result = upstream(*args, current_microbatch=current_microbatch, **options)
        running[identity(result[0])] = action
        return result

    def backward(upstream: Callable, input_tensor: Any, output: Any, *args: Any) -> Any:
        with recorder.span(running.pop(identity(output))._replace(kind=Kind.B)):
            return upstream(input_tensor, output, *args)

    module = "megatron.core.pipeline_parallel.schedules"
    reason = "is timed by no schedule of Megatron's"
    return patched(
        (
            wrapping(f"{module}.forward_step", forward, reason),
            wrapping(f"{module}.backward_step", backward, reason),
        )
    )
