"""A forward and a backward beside each other, by Megatron's schedule plans.

A plan (megatron/core/models/common/model_chunk_schedule_plan.py) divides the layers of a model chunk into nodes: on one
stream attention with the router, and experts; on another the exchange before and after these. Run together, a node of
the forward's plan computes while one of the backward's exchanges, and the other way round. Each node runs under the
segment of its own unit. A unit goes backward by the plan of its forward, so a step with pairs runs all of its forwards
and backwards by plans, alone or not.

A pair is one action in the order of all ranks (schedule/one_queue.py): its exchanges meet those of the ranks that share
the experts, which run the same program, and none of its nodes waits for a message of the pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core.pipeline_parallel.utils import NoopScheduleNode, ScheduleNode, set_streams
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from ..model import Segment
from ..schedule import Action, Kind, Unit
from .forward_segments import SegmentForwards
from .interpreter import Handlers, Interpreter
from .repeated_experts import repeat_experts

# Of a layer of a plan.
_NODES = "pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine", "mtp_post_process"


class LastOutput(NamedTuple):
    """The output of the last stage for a segment."""

    leaf: Tensor
    stand_in: Tensor  # a scalar that stands for it in the backward


class PlannedUnit(NamedTuple):
    """A unit between its forward and its backward."""

    plan: Any
    arrived: Tensor | None  # its input; None on the first stage
    last: LastOutput | None = None  # its output, on the last stage


class PlannedBackward(NamedTuple):
    """A backward that can run."""

    plan: Any  # that of its forward
    gradient: Tensor  # of its output


class PlannedForwards(SegmentForwards):
    """Runs the model on one segment after the other by plans, each beside the backward of another if there is one."""

    _moving: Unit | None = None  # the unit that runs forward, if it moves to the host

    def forward_beside(
        self, stage: int, segment: Segment, arrived: Tensor | None, moves: bool, beside: PlannedBackward | None
    ) -> tuple[PlannedUnit, Tensor]:
        """A unit whose input has `arrived`, and the output of its stage; the backward `beside` it has run, too. If the
        unit `moves`, its tensors may go to the host. Raises ValueError for a model without plans."""
        chunk = self._chunk_of[stage]
        call = self._calls.at(chunk, segment.microbatch)
        model: Any = self._calls.models[chunk]
        require_plans(model)
        plan: Any = None

        def forward(*positional: Any, **named: Any) -> Any:
            nonlocal plan
            plan = model.build_schedule_plan(*positional, **named)
            nodes = self._run_under(plan, stage, segment)
            if not moves:
                return run_plans(plan, beside)
            self._moving = stage, segment.microbatch, segment.index
            output = run_plans(plan, beside)
            self._moving = None
            plan.state.decoder_input = None
            let_go_of_values(nodes, output)
            return output

        output = self._run_model(call, chunk, segment, arrived, forward)
        if stage != self._last_stage:
            return PlannedUnit(plan, arrived), self._take(call, stage, segment, output)
        if not isinstance(output, Tensor):
            raise ValueError(
                f"the model returns a {type(output).__name__}, but plans of pairs go backward from a tensor; drop "
                "--overlap-moe-expert-parallel-comm"
            )
        leaf = output.detach().requires_grad_()
        last = LastOutput(leaf, stand_in=self._take(call, stage, segment, leaf))
        return PlannedUnit(plan, arrived, last), output

    def output_gradient(self, last: LastOutput, segment: Segment) -> Tensor:
        """The gradient of what the last stage returned for a segment."""
        torch.autograd.backward(last.stand_in, self.loss_gradient(last.stand_in, segment))
        gradient = last.leaf.grad
        assert gradient is not None, "what stands for an output gives its gradient"
        return gradient

    def _run_under(self, plan: Any, stage: int, segment: Segment) -> list[ScheduleNode]:
        """Let every node of a plan run, forward and backward, under the segment of its unit. Returns the nodes."""
        unit = stage, segment.microbatch, segment.index

        def under(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                keep_for_stream(given)
                with self._context.running(segment, keeps_for_backward=True, unit=unit, moves=unit == self._moving):
                    return function(*given)

            return run

        nodes = list(nodes_of(plan))
        for node in nodes:
            node.forward_func = under(node.forward_func)
            node.backward_func = under(node.backward_func)
        for index in range(plan.num_layers()):
            repeat_experts(plan.get_layer(index), under, self._context.host_memory.keep)
        return nodes


def let_go_of_values(nodes: Sequence[ScheduleNode], output: Any) -> None:
    """Free the values of the tensors that nodes hold after their forwards, but that of the `output` of all. What a
    backward reads of them, autograd has saved; of these tensors it needs only their graphs and gradients."""
    values: list[Any] = []
    for node in nodes:
        outputs = node.output if isinstance(node.output, tuple) else (node.output,)
        values += [*(node.inputs or ()), *outputs]
        values += [*getattr(node, "detached", ()), *getattr(node, "before_detached", ())]
    for value in values:
        # One without bytes will have them again, from what has discarded it.
        if isinstance(value, Tensor) and value is not output and value.untyped_storage().nbytes():
            value.data = value.new_empty(()).expand(value.shape)


def nodes_of(plan: Any) -> Iterator[ScheduleNode]:
    """The nodes of a plan that do something."""
    nodes = [plan.pre_process, plan.post_process]
    for index in range(plan.num_layers()):
        layer = plan.get_layer(index)
        nodes += [getattr(layer, name) for name in _NODES]
    return (node for node in nodes if node is not None and not isinstance(node, NoopScheduleNode))


def keep_for_stream(given: Sequence[Any]) -> None:
    """Keep the memory of the tensors that a node is `given` until the stream on which it runs is done with them: the
    node before has made them on the other stream, where the plan beside may ask for memory next."""
    for tensor in given:
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())


def require_plans(model: Any) -> None:
    """Raise ValueError for a model that has no plans, or that these compute in another way."""
    if not hasattr(model, "build_schedule_plan"):
        raise ValueError(
            f"a {type(model).__name__} has no schedule plans, which --overlap-moe-expert-parallel-comm needs; drop it"
        )
    layers = model.decoder.layers
    if model.decoder.final_layernorm is not None and len(layers) and not isinstance(layers[-1].mlp, MoELayer):
        raise ValueError(
            "the last layer of the model has no experts, and Megatron's schedule plans would leave out the norm behind "
            "it; drop --overlap-moe-expert-parallel-comm"
        )


def run_plans(forward: Any, backward: PlannedBackward | None) -> Any:
    """The output of a forward, if there is one; a backward has run beside it."""
    if backward is None:
        return type(forward).run(forward, None)
    return type(backward.plan).run(forward, backward.plan, b_grad=backward.gradient)


class PairInterpreter(Interpreter):
    """Runs a program with pairs."""

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
        if action in self.program.paired:
            self._waiting = action
        else:
            self._run_forward(action, None)

    def _backward(self, action: Action) -> None:
        forward = self._waiting
        self._waiting = None
        if action.unit in self.program.moved:
            self.context.host_memory.wait(action.unit)
        self.syncs[self._chunk_of[action.stage]].before_backward()
        unit = self._units.pop(action.unit)
        backward = PlannedBackward(unit.plan, self._gradient_for(action, unit))
        with self.recorder.span(action), self._reducing(Kind.I, action):
            if forward is None:
                run_plans(None, backward)
            else:
                self._run_forward(forward, backward)
            self._end_backward(action, unit.arrived)
        if action.unit in self.program.moved:
            self.context.host_memory.end_backward(action.unit)

    def _run_forward(self, action: Action, beside: PlannedBackward | None) -> None:
        """Run a forward, and the backward beside it if there is one."""
        _, stage, microbatch, index = action
        arrived = self._input_of(action, is_forward=True)
        self.syncs[self._chunk_of[stage]].before_forward()
        segment = self.step.segments[microbatch][index]
        moves = action.unit in self.program.moved
        with self.recorder.span(action):
            unit, output = self.forwards.forward_beside(stage, segment, arrived, moves, beside)
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

    def _end_backward(self, action: Action, arrived: Tensor | None) -> None:
        kind, stage, microbatch, index = action
        segment = self.step.segments[microbatch][index]
        with self.context.running(segment, keeps_for_backward=True, unit=action.unit):
            self.forwards.end_backward(stage, segment)
            if self.program.splits_backwards and kind.facts.gives_weight_gradient:
                with self._reducing(Kind.W, action):
                    self.context.weight_gradients.compute(action.unit)
        if arrived is not None:
            gradient = arrived.grad
            assert gradient is not None, f"stage {stage} gives its input no gradient"
            self._outgoing[Kind.SEND_B, *action.unit] = gradient

    HANDLERS: ClassVar[Handlers] = Interpreter.HANDLERS | {Kind.F: _forward, Kind.B: _backward, Kind.I: _backward}
