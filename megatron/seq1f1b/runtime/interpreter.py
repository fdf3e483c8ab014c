"""Runs the lowered schedule of one rank: one loop, one small handler per kind of action. Megatron's own `forward_step`
and `backward_step` run the model, on segments of what the program called it with."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    check_first_val_step,
    deallocate_output_tensor,
    forward_step,
)
from torch import Tensor
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from ..model import Segment, SegmentContext
from ..schedule import Action, Kind, channels_of
from .call import Call, Calls
from .communication import Communicator
from .cut import CutArguments, narrowed, require_size
from .gradient_sync import GradientSync
from .loss import Losses
from .outputs import Outputs
from .prediction import rows_per_token
from .program import Program
from .step import Step
from .tracer import Recorder

_NOTHING = nullcontext()


@dataclass(eq=False)
class Interpreter:
    """Runs the program of one rank for one step; its own state is empty when the step ends.

    The host time of a unit matters (tools/benchmark_host.py): if a segment's layers take less, the GPU waits.
    """

    step: Step
    program: Program
    communicator: Communicator
    context: SegmentContext
    calls: Calls
    losses: Losses
    syncs: Sequence[GradientSync]
    recorder: Recorder
    follows_segments: bool  # the attention of the model is that of segments

    def __post_init__(self) -> None:
        placement, rank = self.step.placement, self.step.rank
        self._last_stage = placement.num_stages - 1
        self._chunk_of = {stage: placement.chunk_of(stage) for stage in placement.stages_of(rank)}
        self._channels = channels_of(placement, rank)
        self._started_chunks: set[int] = set()
        self._message_shape = cache(partial(message_shape, self.step))
        # The arguments of the calls that are under way, by (model chunk, micro-batch).
        self._arguments: dict[tuple[int, int], CutArguments] = {}
        # The input and output of each forward, by (stage, micro-batch, segment), until its backward.
        self._kept: dict[tuple, tuple[Tensor | None, Tensor]] = {}
        # What the last stage returned, by micro-batch, until the backward of its first segment.
        self._outputs: dict[int, Outputs] = {}
        # Outputs and gradients for a neighbouring stage, by the SEND that carries them if it is on another rank.
        self._outgoing: dict[tuple, Tensor] = {}

    def run(self) -> None:
        """Run the actions in order; an error names the action and those around it."""
        actions = self.program.actions
        # Each action is a range in the PyTorch profiler, and in Nsight with Megatron's --profile.
        is_profiled, handlers = torch.autograd._profiler_enabled(), self.HANDLERS
        for position, action in enumerate(actions):
            try:
                if is_profiled:
                    with record_function(str(action)):
                        handlers[action.kind](self, action)
                else:
                    handlers[action.kind](self, action)
            except Exception as error:
                near = " ".join(map(str, actions[max(position - 3, 0) : position + 4]))
                error.add_note(f"pipeline rank {self.step.rank} failed at {action}, among {near}")
                raise
        self.communicator.finish()
        self.context.assert_empty()
        left = [*self._kept, *self._outgoing, *self._outputs, *self._arguments]
        assert not left, f"tensors outlived the step: {left}"

    def _forward(self, action: Action) -> None:
        _, stage, microbatch, index = action
        step, chunk = self.step, self._chunk_of[stage]
        segment = step.segments[microbatch][index]
        arrived = self._input_of(action, is_forward=True)
        is_first_of_chunk = chunk not in self._started_chunks
        self._started_chunks.add(chunk)
        self.syncs[chunk].before_forward()
        moves = action[1:] in self.program.moved
        with self.recorder.span(action):
            call = self.calls.at(chunk, microbatch)
            with self.context.running(segment, not step.forward_only, action[1:], moves):
                output = self._run_model(call, chunk, segment, arrived, is_first_of_chunk)
            if moves and arrived is not None:
                # The graph holds all that the backward needs; this tensor only receives its gradient.
                arrived.data = arrived.new_empty(()).expand(arrived.shape)
            kept = output
            if stage == self._last_stage:
                kept = self._outputs_of(call, segment).add(output, segment)
            else:
                self._outgoing[Kind.SEND_F, *action[1:]] = output
            if not step.forward_only:
                self._kept[action[1:]] = arrived, kept
            if segment.is_last:
                self._finish(call, stage, microbatch, output)

    def _run_model(
        self, call: Call, chunk: int, segment: Segment, arrived: Tensor | None, is_first_of_chunk: bool
    ) -> Any:
        """The output of a model chunk for a segment, by Megatron's `forward_step` without a loss."""
        step = self.step
        arguments = self._arguments_of(call, chunk, segment).of(segment)
        output: list[Any] = []

        def run_model(*_: Any) -> tuple[Tensor, None]:
            output.append(self.calls.run(chunk, call, arguments))
            return next(filter(torch.is_tensor, tree_leaves(output))), None

        forward_step(
            run_model,
            None,
            step.chunks[chunk],
            step.num_microbatches,
            arrived,
            [],
            step.config,
            cp_group_size=step.groups.cp.size(),
            is_first_microbatch=check_first_val_step(step.first_val_step, step.forward_only, is_first_of_chunk),
            current_microbatch=segment.microbatch,
            vp_stage=chunk if len(step.chunks) > 1 else None,
            is_last_stage=False,
        )
        return output[0]

    def _arguments_of(self, call: Call, chunk: int, segment: Segment) -> CutArguments:
        """The arguments of a call, cut by the segments of its micro-batch."""
        key = chunk, segment.microbatch
        if key not in self._arguments:
            is_first_stage = self.step.placement.stage_of(self.step.rank, chunk) == 0
            number, length = self.step.num_sequences[segment.microbatch], segment.sequence_length
            if is_first_stage and not segment.is_whole_sequence:
                require_size(call.arguments, number, length, segment.microbatch)
            if self.follows_segments and segment.documents is None:
                where = f"the attention mask of micro-batch {segment.microbatch}"
                self.context.masks.require_causal(call.arguments.by_name().get("attention_mask"), length, where)
            part = narrowed if call.shares is None else call.shares.part
            self._arguments[key] = CutArguments(call.arguments, number, length, part, self.follows_segments)
        return self._arguments[key]

    def _outputs_of(self, call: Call, segment: Segment) -> Outputs:
        """What the last stage has returned for a micro-batch so far."""
        microbatch = segment.microbatch
        if segment.is_first:
            rearranged = call.shares and partial(call.shares.rearranged, segments=self.step.segments[microbatch])
            self._outputs[microbatch] = Outputs(segment.sequence_length, self.step.groups.cp.size(), rearranged)
        return self._outputs[microbatch]

    def _finish(self, call: Call, stage: int, microbatch: int, output: Any) -> None:
        """Let the program go on after its call of the model: on the last stage, to its loss."""
        chunk = self._chunk_of[stage]
        del self._arguments[chunk, microbatch]
        if stage == self._last_stage:
            output, loss_func = self.calls.finish(chunk, microbatch, self._outputs[microbatch].joined())
            self.losses.add(chunk, microbatch, output, loss_func)
            if self.step.forward_only:
                del self._outputs[microbatch]
            return
        handed = output.detach()
        returned, _ = self.calls.finish(chunk, microbatch, handed)
        if returned is not handed:
            raise ValueError(
                f"the forward step of micro-batch {microbatch} changes the output of a stage before the last, which has "
                "already gone to the next stage in segments; return it as the model gave it"
            )

    def _backward(self, action: Action) -> None:
        kind, stage, microbatch, index = action
        segment = self.step.segments[microbatch][index]
        if action[1:] in self.program.moved:
            self.context.host_memory.wait(action[1:])
        self.syncs[self._chunk_of[stage]].before_backward()
        arrived, output = self._kept.pop(action[1:])
        if stage == self._last_stage:
            gradient = torch.ones_like(output)  # of what stands for the outputs of the segment
        else:
            gradient = self._input_of(action, is_forward=False)
        with self.context.running(segment, True, action[1:]), self.recorder.span(action):
            with self._reducing(Kind.I, action):
                gradient = backward_step(arrived, output, gradient, self.step.config)
            if kind is Kind.B and self.program.splits_backwards:
                with self._reducing(Kind.W, action):
                    self.context.weight_gradients.compute(action[1:])
        if stage == self._last_stage and segment.is_first:
            del self._outputs[microbatch]
        if stage > 0:
            self._outgoing[Kind.SEND_B, *action[1:]] = gradient

    def _weight_gradient(self, action: Action) -> None:
        segment = self.step.segments[action.microbatch][action.segment]
        with self.context.running(segment, True), self.recorder.span(action), self._reducing(Kind.W, action):
            self.context.weight_gradients.compute(action[1:])

    def _reducing(self, half: Kind, action: Action) -> AbstractContextManager:
        """A context for this half of a backward: if it is the chunk's last, gradients may be reduced in it."""
        is_last = (half, action) in self.program.ends
        return self.syncs[self._chunk_of[action.stage]].last_backward() if is_last else _NOTHING

    def _input_of(self, action: Action, is_forward: bool) -> Tensor | None:
        """The activations or output gradient that an action starts from."""
        _, stage, *unit = action
        if is_forward and stage == 0:
            return None
        kind = Kind.RECV_F if is_forward else Kind.RECV_B
        if (kind, stage) in self._channels:
            tensor = self.communicator.receive((kind, *action[1:]))
        else:  # from a neighbouring stage on this rank
            sent = (Kind.SEND_F, stage - 1) if is_forward else (Kind.SEND_B, stage + 1)
            handed = self._outgoing.pop((*sent, *unit))
            tensor = handed.detach()
            self._deallocate(handed, is_forward)
        return tensor.requires_grad_(is_forward)

    def _post_receive(self, action: Action) -> None:
        kind, stage, microbatch, index = action
        length = self.step.segments[microbatch][index].length
        sender = stage - 1 if kind is Kind.RECV_F else stage
        shape = self._message_shape(self.step.num_sequences[microbatch], length, sender)
        self.communicator.post_receive(self._channels[kind, stage], shape, action)

    def _send(self, action: Action) -> None:
        kind, stage, microbatch, index = action
        tensor = self._outgoing.pop(action)
        length = self.step.segments[microbatch][index].length
        shape = self._message_shape(length, stage if kind is Kind.SEND_F else stage - 1)
        self.communicator.send(self._channels[kind, stage], tensor, shape, action)
        self._deallocate(tensor, kind is Kind.SEND_F)

    def _deallocate(self, output: Tensor, is_forward: bool) -> None:
        """Free the storage of an output that was passed on: the graph needs its grad_fn only."""
        if is_forward and not self.step.forward_only:
            deallocate_output_tensor(output, self.step.config.deallocate_pipeline_outputs)

    # On the class, since bound methods would form a cycle that keeps a step until a garbage collection.
    HANDLERS: ClassVar[dict[Kind, Callable[["Interpreter", Action], None]]] = {
        Kind.F: _forward,
        Kind.B: _backward,
        Kind.I: _backward,
        Kind.W: _weight_gradient,
        Kind.RECV_F: _post_receive,
        Kind.RECV_B: _post_receive,
        Kind.SEND_F: _send,
        Kind.SEND_B: _send,
        Kind.GATHER: lambda self, action: self.syncs[self._chunk_of[action.stage]].gather(),
        Kind.REDUCE: lambda self, action: self.syncs[self._chunk_of[action.stage]].reduce(),
        Kind.RELEASE: lambda self, action: self.syncs[self._chunk_of[action.stage]].release(),
        Kind.OFFLOAD: lambda self, action: self.context.host_memory.offload(action[1:], self.recorder.span(action)),
        Kind.RELOAD: lambda self, action: self.context.host_memory.reload(action[1:], self.recorder.span(action)),
    }


def message_shape(step: Step, num_sequences: int, length: int, stage: int) -> tuple[int, ...]:
    """The shape of the activations of a segment of `length` tokens that `stage` sends, and of their gradients."""
    # Megatron's interleaved schedules ignore the length of the decoder's sequences, too.
    is_plain = len(step.chunks) == step.shape.num_segments == 1
    if is_plain and step.decoder_seq_length is not None:
        length = step.decoder_seq_length
    rows = length // step.groups.cp.size()
    if step.config.sequence_parallel:
        rows //= step.groups.tp.size()
    return (rows * rows_per_token(step.config, step.placement, stage), num_sequences, step.config.hidden_size)
