"""Runs the lowered schedule of one rank: one loop, one small handler per kind of action."""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor
from torch import Tensor

from ..model import SegmentContext, free_values
from ..schedule import Action, Kind, Unit, channels_of
from .communication import Communicator
from .forwards.multi_token import rows_per_token
from .forwards.protocol import Forwards
from .gradients.chunk_sync import ChunkSync
from .rank_schedule import RankSchedule
from .recording.recorder import StepRecorder
from .recording.spans import around_actions
from .step import Step

_NOTHING = nullcontext()

# What an interpreter does at an action, by its kind.
type Handlers = dict[Kind, Callable[[Any, Action], None]]


@dataclass(eq=False)
class Interpreter:
    """Runs the schedule of one rank for one step; its own state is empty when the step ends.

    Keep this loop cheap (tools/benchmark_host.py): if the kernels of a segment end before the host has issued the next
    ones, the GPU idles.
    """

    step: Step
    schedule: RankSchedule
    communicator: Communicator
    context: SegmentContext
    forwards: Forwards
    syncs: Sequence[ChunkSync]
    recorder: StepRecorder

    def __post_init__(self) -> None:
        placement = self.step.placement
        rank = self.step.rank
        self._last_stage = placement.num_stages - 1
        self._chunk_of = {stage: placement.chunk_of(stage) for stage in placement.stages_of(rank)}
        self._channels = channels_of(placement, rank)
        self._message_shape = cache(partial(message_shape, self.step))
        # The input and output of each forward, until its backward.
        self._kept: dict[Unit, tuple[Tensor | None, Tensor]] = {}
        # Outputs and gradients for a neighbouring stage, by the SEND that carries them if it is on another rank.
        self._outgoing: dict[tuple, Tensor] = {}

    def run(self) -> None:
        """Run the actions in order; an error names the action and those around it."""
        actions = self.schedule.actions
        around = around_actions()
        handlers = self.HANDLERS
        for position, action in enumerate(actions):
            try:
                if around is not None:
                    with around(str(action)):
                        handlers[action.kind](self, action)
                else:
                    handlers[action.kind](self, action)
            except Exception as error:
                near = " ".join(map(str, actions[max(position - 3, 0) : position + 4]))
                error.add_note(f"pipeline rank {self.step.rank} failed at {action}, among {near}")
                raise
        self.communicator.finish()
        self.context.assert_empty()
        self.forwards.assert_empty()
        assert not self._kept and not self._outgoing, f"tensors outlived the step: {[*self._kept, *self._outgoing]}"

    def _forward(self, action: Action) -> None:
        _, stage, microbatch, index = action
        unit = action.unit
        segment = self.step.segments[microbatch][index]
        input_tensor = self._input_of(action, is_forward=True)
        self.syncs[self._chunk_of[stage]].before_forward()
        moves = unit in self.schedule.moved
        with self.recorder.span(action):
            output = self.forwards.forward(stage, segment, input_tensor, moves)
        if moves and input_tensor is not None:
            free_values(input_tensor)  # the graph holds all that the backward reads of it
        if not self.step.forward_only:
            self._kept[unit] = input_tensor, output
        if stage != self._last_stage:
            self._outgoing[Kind.SEND_F, *unit] = output

    def _backward(self, action: Action) -> None:
        kind, stage, microbatch, index = action
        unit = action.unit
        segment = self.step.segments[microbatch][index]
        if unit in self.schedule.moved:
            self.context.host_memory.wait(unit)
        self.syncs[self._chunk_of[stage]].before_backward()
        input_tensor, output = self._kept.pop(unit)
        if stage == self._last_stage:
            gradient = self.forwards.loss_gradient(output, segment)
        else:
            gradient = self._input_of(action, is_forward=False)
        with self.context.running(segment, keeps_for_backward=True, unit=unit), self.recorder.span(action):
            with self._reducing(action, self.schedule.last_input_gradients):
                # That of the output becomes that of the input, and has no other name, so that its memory is free now.
                gradient = backward_step(input_tensor, output, gradient, self.step.config)
                self.forwards.end_backward(stage, segment)
            if self.schedule.splits_backwards and kind.facts.gives_weight_gradient:
                with self._reducing(action, self.schedule.last_weight_gradients):
                    self.context.weight_gradients.compute(unit)
        if unit in self.schedule.moved:
            self.context.host_memory.end_backward(unit)
        if stage > 0:
            self._outgoing[Kind.SEND_B, *unit] = gradient

    def _weight_gradient(self, action: Action) -> None:
        segment = self.step.segments[action.microbatch][action.segment]
        running = self.context.running(segment, keeps_for_backward=True)
        reducing = self._reducing(action, self.schedule.last_weight_gradients)
        with running, self.recorder.span(action), reducing:
            self.context.weight_gradients.compute(action.unit)

    def _reducing(self, action: Action, last: Set[Action]) -> AbstractContextManager:
        """A context for a half of a backward; gradients may be reduced in it if it is the last of its chunk."""
        return self.syncs[self._chunk_of[action.stage]].last_backward() if action in last else _NOTHING

    def _input_of(self, action: Action, is_forward: bool) -> Tensor | None:
        """The activations or output gradient that an action starts from."""
        _, stage, *unit = action
        if is_forward and stage == 0:
            return None
        kind = Kind.RECV_F if is_forward else Kind.RECV_B
        if (kind, stage) in self._channels:
            tensor = self.communicator.receive((kind, stage, *unit))
        else:  # from a neighbouring stage on this rank
            sent = (Kind.SEND_F, stage - 1) if is_forward else (Kind.SEND_B, stage + 1)
            handed = self._outgoing.pop((*sent, *unit))
            tensor = handed.detach()
            self._deallocate(handed, is_forward)
        return tensor.requires_grad_(is_forward)

    def _post_receive(self, action: Action) -> None:
        channel = self._channels[action.kind, action.stage]
        self.communicator.post_receive(channel, self._shape_of(action), action)

    def _send(self, action: Action) -> None:
        tensor = self._outgoing.pop(action)
        channel = self._channels[action.kind, action.stage]
        self.communicator.send(channel, tensor, self._shape_of(action), action)
        self._deallocate(tensor, action.kind is Kind.SEND_F)

    def _shape_of(self, message: Action) -> tuple[int, ...]:
        """The shape of what a SEND or RECV carries."""
        kind, stage, microbatch, index = message
        length = self.step.segments[microbatch][index].length
        return self._message_shape(self.step.num_sequences[microbatch], length, kind, stage)

    def _deallocate(self, output: Tensor, is_forward: bool) -> None:
        """Free the storage of an output that was passed on: the graph needs its grad_fn only."""
        if is_forward and not self.step.forward_only:
            deallocate_output_tensor(output, self.step.config.deallocate_pipeline_outputs)

    # On the class, since bound methods would form a cycle that keeps a step until a garbage collection.
    HANDLERS: ClassVar[Handlers] = {
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
        Kind.OFFLOAD: lambda self, action: self.context.host_memory.offload(action.unit, self.recorder.span(action)),
        Kind.RELOAD: lambda self, action: self.context.host_memory.reload(action.unit, self.recorder.span(action)),
    }


def message_shape(step: Step, num_sequences: int, length: int, kind: Kind, stage: int) -> tuple[int, ...]:
    """The shape [rows, b, h] of what a SEND or RECV of `stage` carries for a segment of `length` tokens of b sequences.

    A rank has a row for each of its tokens: context-parallel ranks divide them, with sequence parallelism
    tensor-parallel ranks, too; after multi-token prediction, a row for each token and depth.
    """
    # The decoder has sequences of its own length only where whole sequences of the step's `seq_length` pass through one
    # chunk a rank: Megatron's interleaved schedules ignore that length, too, and calls of the model tell their own.
    is_plain = len(step.chunks) == 1 and step.shape.num_segments == 1
    if is_plain and length == step.seq_length and step.decoder_seq_length is not None:
        length = step.decoder_seq_length
    rows = length // step.groups.cp.size()
    if step.config.sequence_parallel:
        rows //= step.groups.tp.size()
    # Gradients have the shape of the activations, which the earlier of the two stages sends.
    sender = min(stage, stage + kind.facts.hop)
    return (rows * rows_per_token(step.config, step.placement, sender), num_sequences, step.config.hidden_size)
