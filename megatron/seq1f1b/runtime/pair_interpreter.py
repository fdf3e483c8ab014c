"""Runs a schedule with pairs: a forward and a backward beside each other, by Megatron's schedule plans.

A pair is one action in the order of all ranks (schedule/one_queue.py): its exchanges meet those of the ranks that share
the experts, which run the same schedule, and none of its nodes waits for a message of the pipeline.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from typing import ClassVar

from megatron.core.pipeline_parallel.utils import set_streams
from torch import Tensor

from ..schedule import Action, Kind, Unit
from .forwards.schedule_plans import PlannedBackward, PlannedForwards, PlannedUnit, run_plans
from .interpreter import Handlers, Interpreter


class PairInterpreter(Interpreter):
    """Runs a schedule with pairs."""

    forwards: PlannedForwards

    def __post_init__(self) -> None:
        super().__post_init__()
        set_streams(high_priority=getattr(self.step.config, "high_priority_a2a_comm_stream", False))
        self._waiting: Action | None = None  # the forward of a pair, for the backward after it
        self._units: dict[Unit, PlannedUnit] = {}  # between their forwards and backwards

    def run(self) -> None:
        """Run the actions in order; an error names the action and those around it."""
        super().run()
        assert not self._units, f"plans outlived the step: {[*self._units]}"

    def _forward(self, action: Action) -> None:
        if action in self.schedule.paired:
            self._waiting = action
        else:
            self._run_forward(action, None)

    def _backward(self, action: Action) -> None:
        forward = self._waiting
        self._waiting = None
        if action.unit in self.schedule.moved:
            self.context.host_memory.wait(action.unit)
        self.syncs[self._chunk_of[action.stage]].before_backward()
        unit = self._units.pop(action.unit)
        backward = PlannedBackward(unit.plan, self._gradient_for(action, unit))
        with self.recorder.span(action), self._reducing(action, self.schedule.last_input_gradients):
            if forward is None:
                run_plans(None, backward)
            else:
                self._run_forward(forward, backward)
            self._end_backward(action, unit.input_tensor)
        if action.unit in self.schedule.moved:
            self.context.host_memory.end_backward(action.unit)

    def _run_forward(self, action: Action, beside: PlannedBackward | None) -> None:
        """Run a forward, and the backward beside it if there is one."""
        _, stage, microbatch, index = action
        input_tensor = self._input_of(action, is_forward=True)
        self.syncs[self._chunk_of[stage]].before_forward()
        segment = self.step.segments[microbatch][index]
        moves = action.unit in self.schedule.moved
        with self.recorder.span(action):
            unit, output = self.forwards.forward_beside(stage, segment, input_tensor, moves, beside)
        self._units[action.unit] = unit
        if stage != self._last_stage:
            self._outgoing[Kind.SEND_F, *action.unit] = output

    def _gradient_for(self, action: Action, unit: PlannedUnit) -> Tensor:
        """The gradient of the output of a unit that goes backward."""
        _, stage, microbatch, index = action
        if unit.last is not None:
            return self.forwards.output_gradient(unit.last, self.step.segments[microbatch][index])
        gradient = self._input_of(action, is_forward=False)
        assert gradient is not None, f"{action} has no gradient from stage {stage + 1}"
        return gradient

    def _end_backward(self, action: Action, input_tensor: Tensor | None) -> None:
        kind, stage, microbatch, index = action
        segment = self.step.segments[microbatch][index]
        with self.context.running(segment, keeps_for_backward=True, unit=action.unit):
            self.forwards.end_backward(stage, segment)
            if self.schedule.splits_backwards and kind.facts.gives_weight_gradient:
                with self._reducing(action, self.schedule.last_weight_gradients):
                    self.context.weight_gradients.compute(action.unit)
        if input_tensor is not None:
            gradient = input_tensor.grad
            assert gradient is not None, f"stage {stage} gives its input no gradient"
            self._outgoing[Kind.SEND_B, *action.unit] = gradient

    HANDLERS: ClassVar[Handlers] = Interpreter.HANDLERS | {Kind.F: _forward, Kind.B: _backward, Kind.I: _backward}
