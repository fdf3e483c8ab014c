"""Segments of micro-batches: the model runs on parts of what the program called it with.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import check_first_val_step, forward_step
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...model import Segment, SegmentContext
from ..model_calls.argument_gradients import ArgumentGradients
from ..model_calls.call import Call
from ..model_calls.call_arguments import CutArguments, narrowed, require_size
from ..model_calls.calls import Calls
from ..model_calls.outputs import Outputs
from ..step import Step
from .loss import Losses


class SegmentForwards:
    """Runs the model on one segment after the other. With the last one the program's call of the model returns, and on
    the last stage the program computes its loss, whose gradient waits for the backwards of the segments.

    If the attention of the model `follows_segments`, it hides later tokens and other documents by itself.
    """

    def __init__(
        self, step: Step, context: SegmentContext, losses: Losses, calls: Calls, follows_segments: bool
    ) -> None:
        self._step = step
        self._context = context
        self._losses = losses
        self._calls = calls
        self._follows_segments = follows_segments
        placement = step.placement
        self._last_stage = placement.num_stages - 1
        self._chunk_of = {stage: placement.chunk_of(stage) for stage in placement.stages_of(step.rank)}
        self._started_chunks: set[int] = set()
        # The arguments of the calls that are under way, by (model chunk, micro-batch).
        self._arguments: dict[tuple[int, int], CutArguments] = {}
        # What the last stage returned, by micro-batch, until the backward of its first segment.
        self._outputs: dict[int, Outputs] = {}
        # The gradients of arguments, by (model chunk, micro-batch), until the backward of its first segment.
        self._argument_gradients: dict[tuple[int, int], ArgumentGradients] = {}

    def forward(self, stage: int, segment: Segment, input_tensor: Tensor | None, moves: bool) -> Tensor:
        """As `Forwards.forward`; the scalar of the last stage stands for its output in the backward."""
        microbatch = segment.microbatch
        chunk = self._chunk_of[stage]
        call = self._calls.at(chunk, microbatch)
        unit = stage, microbatch, segment.index
        keeps_for_backward = not self._step.forward_only
        with self._context.running(segment, keeps_for_backward, unit, moves):
            output = self._run_model(call, chunk, segment, input_tensor)
        return self._take(call, stage, segment, output)

    def _take(self, call: Call, stage: int, segment: Segment, output: Any) -> Tensor:
        """Take the output of a stage for a segment; what `forward` returns for it."""
        microbatch = segment.microbatch
        chunk = self._chunk_of[stage]
        kept = output
        if stage == self._last_stage:
            kept = self._outputs_of(call, segment).add(output, segment)
        if segment.is_last:
            del self._arguments[chunk, microbatch]
            self._return_to_program(call, chunk, stage, microbatch, output)
        return kept

    def loss_gradient(self, output: Tensor, segment: Segment) -> Tensor:
        """The gradient of the scalar that stands for what the last stage returned for a segment."""
        if segment.is_first:
            del self._outputs[segment.microbatch]  # the graph of the segment holds it
        return torch.ones_like(output)

    def end_backward(self, stage: int, segment: Segment) -> None:
        """Called behind the backward of a segment on a stage. After the first segment's, which is the last backward of
        a call, what the program computed before the call goes backward, too."""
        if self._argument_gradients and segment.is_first:
            gradients = self._argument_gradients.pop((self._chunk_of[stage], segment.microbatch), None)
            if gradients is not None:
                gradients.go_backward()

    def assert_empty(self) -> None:
        left = [*self._arguments, *self._outputs, *self._argument_gradients]
        assert not left, f"calls outlived the step: {left}"

    def _run_model(
        self,
        call: Call,
        chunk: int,
        segment: Segment,
        input_tensor: Tensor | None,
        forward: Callable[..., Any] | None = None,
    ) -> Any:
        """The output of a model chunk, by its own `forward` unless another is given, in Megatron's `forward_step`
        without a loss."""
        step = self._step
        arguments = self._arguments_of(call, chunk, segment).of(segment)
        output: Any = None  # of any structure; Megatron's function takes a tensor only

        def run_model(*_: Any) -> tuple[Tensor, None]:
            nonlocal output
            output = self._calls.run(chunk, call, arguments, forward)
            tensor = output if isinstance(output, Tensor) else _first_tensor(output)
            return tensor, None

        is_first_microbatch = False
        if chunk not in self._started_chunks:
            self._started_chunks.add(chunk)
            is_first_microbatch = check_first_val_step(step.first_val_step, step.forward_only, True)
        forward_step(
            run_model,
            None,
            call.reference or step.chunks[chunk],
            step.num_microbatches,
            input_tensor,
            [],
            step.config,
            cp_group_size=step.groups.cp.size(),
            is_first_microbatch=is_first_microbatch,
            current_microbatch=segment.microbatch,
            vp_stage=chunk if len(step.chunks) > 1 else None,
            is_last_stage=False,
        )
        return output

    def _arguments_of(self, call: Call, chunk: int, segment: Segment) -> CutArguments:
        """The arguments of a call; with its first segment they are checked and cut."""
        key = chunk, segment.microbatch
        if key not in self._arguments:
            self._check_arguments(call, chunk, segment)
            cut = self._cut_arguments(call, segment)
            self._arguments[key] = cut
            if cut.gradients is not None and not self._step.forward_only:
                self._argument_gradients[key] = cut.gradients
            if call.routes is not None:
                self._context.take_routes(segment.microbatch, call.routes.by_router)
        return self._arguments[key]

    def _check_arguments(self, call: Call, chunk: int, segment: Segment) -> None:
        """Raise ValueError for data of another size than the step is cut for, and for a mask that segments ignore."""
        microbatch = segment.microbatch
        length = segment.sequence_length
        is_first_stage = self._step.placement.stage_of(self._step.rank, chunk) == 0
        if is_first_stage and not segment.is_whole_sequence:
            require_size(call.arguments, self._step.num_sequences[microbatch], length, microbatch)
        if self._follows_segments and segment.documents is None:
            mask = call.arguments.by_name().get("attention_mask")
            self._context.masks.require_causal(mask, length, f"the attention mask of micro-batch {microbatch}")

    def _cut_arguments(self, call: Call, segment: Segment) -> CutArguments:
        return CutArguments(
            arguments=call.arguments,
            num_sequences=self._step.num_sequences[segment.microbatch],
            length=segment.sequence_length,
            part=narrowed if call.shares is None else call.shares.part,
            follows_segments=self._follows_segments,
            sequence_parallel=self._step.sequence_parallel,
        )

    def _outputs_of(self, call: Call, segment: Segment) -> Outputs:
        microbatch = segment.microbatch
        if segment.is_first:
            rearranged = None
            if call.shares is not None:
                rearranged = partial(call.shares.rearranged, segments=self._step.segments[microbatch])
            self._outputs[microbatch] = Outputs(segment.sequence_length, self._step.groups.cp.size(), rearranged)
        return self._outputs[microbatch]

    def _return_to_program(self, call: Call, chunk: int, stage: int, microbatch: int, output: Any) -> None:
        """Let the program go on behind its call of the model: on the last stage, to its loss."""
        if stage == self._last_stage:
            joined = self._outputs[microbatch].joined()
            self._losses.add(chunk, microbatch, *self._calls.finish(chunk, microbatch, joined))
            if self._step.forward_only:
                del self._outputs[microbatch]
            return
        handed = output.detach()
        version = handed._version  # PyTorch counts changes in place
        returned, _ = self._calls.finish(chunk, microbatch, handed)
        if call.num_reference_elements == 0:
            is_handed_on = returned is handed
        else:  # in one tensor with the outputs of references
            is_handed_on = returned.numel() == call.num_reference_elements + handed.numel()
        if not is_handed_on or handed._version != version:
            raise ValueError(
                f"the forward step of micro-batch {microbatch} changes the output of a stage before the last, which "
                "has already gone to the next stage in segments; return it as the model gave it"
            )


def _first_tensor(output: Any) -> Tensor:
    """A tensor of a structure: Megatron asks for its device. Raises ValueError if there is none."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            return leaf
    raise ValueError(
        f"the model returns a {type(output).__name__}, in which no tensor is found to be joined over segments; return "
        "a tensor, a dict, list or tuple of them, or a dataclass that torch.utils._pytree.register_dataclass knows"
    )
