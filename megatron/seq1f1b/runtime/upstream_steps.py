"""Measures Megatron's own schedules, so that their timelines can be laid beside ours."""

from collections.abc import Callable
from typing import Any

from ..schedule import Action, Kind, Placement
from .recorder import Recorder


class UpstreamSteps:
    """Megatron's `forward_step` and `backward_step`, timed; they take the places of those during one call."""

    def __init__(
        self, forward_step: Callable, backward_step: Callable, recorder: Recorder, placement: Placement, rank: int
    ) -> None:
        self._forward_step = forward_step
        self._backward_step = backward_step
        self._recorder = recorder
        self._placement = placement
        self._rank = rank
        self._running: dict[int, Action] = {}

    def forward_step(self, *args: Any, current_microbatch: int, vp_stage: int | None = None, **kwargs: Any) -> Any:
        """Time a forward as F of its stage and micro-batch."""
        action = Action(Kind.F, self._placement.stage_of(self._rank, vp_stage or 0), current_microbatch, 0)
        with self._recorder.span(action):
            result = self._forward_step(*args, current_microbatch=current_microbatch, vp_stage=vp_stage, **kwargs)
        self._running[_identity(result[0])] = action
        return result

    def backward_step(self, input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        """Time a backward as B of the unit whose forward gave `output_tensor`."""
        action = self._running.pop(_identity(output_tensor))._replace(kind=Kind.B)
        with self._recorder.span(action):
            return self._backward_step(input_tensor, output_tensor, *args)


def _identity(output: Any) -> int:
    """Megatron hands outputs around bare or as lists of one."""
    return id(output[0] if isinstance(output, list) else output)
