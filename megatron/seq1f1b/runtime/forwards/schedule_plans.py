"""Forwards by Megatron's schedule plans, each beside the backward of another unit if there is one.

A plan (megatron/core/models/common/model_chunk_schedule_plan.py) divides the layers of a model chunk into nodes: on one
stream attention with the router, and experts; on another the exchange before and after these. Run together, a node of
the forward's plan computes while one of the backward's exchanges, and the other way round. Each node runs under the
segment of its own unit. A unit goes backward by the plan of its forward, so a step with pairs runs all of its forwards
and backwards by plans, alone or not (pair_interpreter.py).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.utils import NoopScheduleNode, ScheduleNode
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from ...model import Segment, free_values
from ...schedule import Unit
from .forward_segments import SegmentForwards
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
    input_tensor: Tensor | None  # None on the first stage
    last: LastOutput | None = None  # its output, on the last stage


class PlannedBackward(NamedTuple):
    """A backward that can run."""

    plan: Any  # that of its forward
    gradient: Tensor  # of its output


class PlannedForwards(SegmentForwards):
    """Runs the model on one segment after the other by plans, each beside the backward of another if there is one."""

    _moving: Unit | None = None  # the unit that runs forward, if it moves to the host

    def forward_beside(
        self, stage: int, segment: Segment, input_tensor: Tensor | None, moves: bool, beside: PlannedBackward | None
    ) -> tuple[PlannedUnit, Tensor]:
        """The unit that ran forward on `input_tensor`, and the output of its stage; the backward `beside` it has run,
        too. If the unit `moves`, its tensors may go to the host. Raises ValueError for a model without plans."""
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

        output = self._run_model(call, chunk, segment, input_tensor, forward)
        if stage != self._last_stage:
            return PlannedUnit(plan, input_tensor), self._take(call, stage, segment, output)
        if not isinstance(output, Tensor):
            raise ValueError(
                f"the model returns a {type(output).__name__}, but plans of pairs go backward from a tensor; drop "
                "--overlap-moe-expert-parallel-comm"
            )
        leaf = output.detach().requires_grad_()
        last = LastOutput(leaf, stand_in=self._take(call, stage, segment, leaf))
        return PlannedUnit(plan, input_tensor, last), output

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
    """Free the values of all tensors that nodes hold after their forwards, except for the `output` of the last one.
    Autograd has saved what backwards read of them."""
    values: list[Any] = []
    for node in nodes:
        outputs = node.output if isinstance(node.output, tuple) else (node.output,)
        values += [*(node.inputs or ()), *outputs]
        values += [*getattr(node, "detached", ()), *getattr(node, "before_detached", ())]
    for value in values:
        # One without bytes has been discarded, and its recomputation will fill it again.
        if isinstance(value, Tensor) and value is not output and value.untyped_storage().nbytes():
            free_values(value)


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
