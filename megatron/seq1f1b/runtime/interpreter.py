"""Runs the lowered schedule of one rank: one loop, one small handler per kind of action.

It knows no family, no phase and no neighbour by name. What an action means for a model is left to Megatron's own
`forward_step` and `backward_step`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    check_first_val_step,
    deallocate_output_tensor,
    forward_step,
)
from torch import Tensor

from ..model import Segment, SegmentContext, WeightGradientStore
from ..schedule import Action, Kind, Placement, channel_of
from .communication import Communicator
from .data import SegmentIterator
from .gradient_sync import GradientSync
from .loss import LossLedger
from .recorder import Recorder


@dataclass(frozen=True)
class Step:
    """What Megatron asks for in one call, and the segments that the call is cut into.

    `segments[m][s]` is segment s of micro-batch m; `chunks` and `batches` are the model chunks of this rank and their
    data. `message_shape(length)` is the shape of the activations of that many tokens between two stages.
    """

    forward_step_func: Callable
    chunks: Sequence[torch.nn.Module]
    batches: Sequence[SegmentIterator | None]
    segments: Sequence[Sequence[Segment]]
    config: Any
    message_shape: Callable[[int], tuple[int, ...]]
    context_parallel_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


class Interpreter:
    """State of one step on one rank; it is empty when the step ends."""

    def __init__(
        self,
        step: Step,
        placement: Placement,
        rank: int,
        communicator: Communicator,
        context: SegmentContext,
        weight_gradients: WeightGradientStore,
        losses: LossLedger,
        sync: GradientSync,
        sequence_length_is: Callable[[int], AbstractContextManager],
        recorder: Recorder | None,
    ) -> None:
        self._step = step
        self._placement = placement
        self._rank = rank
        self._communicator = communicator
        self._context = context
        self._weight_gradients = weight_gradients
        self._losses = losses
        self._sync = sync
        self._sequence_length_is = sequence_length_is
        self._recorder = recorder
        self._started_chunks: set[int] = set()
        # Forwards that recompute all layers in their backward, where Megatron asks for that by micro-batch.
        self._recomputed: frozenset[Action] | None = None
        # The last actions of each chunk that give input gradients, and that give weight gradients.
        self._last: set[tuple[Kind, Action]] = set()
        # Keyed by the F of a unit: what went into it and came out, until its backward.
        self._kept: dict[Action, tuple[Tensor | None, Tensor]] = {}
        # Keyed by the SEND that carries it, or would if the neighbouring stage were on another rank.
        self._outgoing: dict[Action, Tensor] = {}
        self._handlers = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weight_gradient,
            Kind.RECV_F: self._post_receive,
            Kind.RECV_B: self._post_receive,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.GATHER: self._gather,
            Kind.REDUCE: self._reduce,
        }

    def run(self, program: Sequence[Action]) -> None:
        """Run the actions in order. A failure names the action and what stands around it."""
        for half in (Kind.I, Kind.W):
            last = {action.stage: action for action in program if action.kind in (Kind.B, half)}
            self._last.update((half, action) for action in last.values())
        self._recomputed = self._all_but_partially_checkpointed(program)
        for position, action in enumerate(program):
            try:
                self._handlers[action.kind](action)
            except Exception as error:
                around = [str(near) for near in program[max(position - 3, 0) : position + 4]]
                error.add_note(f"pipeline rank {self._rank} failed at {action}, among {' '.join(around)}")
                raise
        self._communicator.finish()
        self._context.assert_empty()
        self._weight_gradients.assert_empty()
        assert not self._kept and not self._outgoing, f"tensors outlived the step: {[*self._kept, *self._outgoing]}"

    def _all_but_partially_checkpointed(self, program: Sequence[Action]) -> frozenset[Action] | None:
        """What is left by `num_microbatches_with_partial_activation_checkpoints`, None if Megatron does not ask.

        As many micro-batches may keep more, of those that are in flight at once (arXiv 2205.05198, appendix C).
        """
        limit = self._step.config.num_microbatches_with_partial_activation_checkpoints
        if limit is None:
            return None
        order = [action for action in program if action.kind in (Kind.F, Kind.B, Kind.I)]
        in_flight = next((index for index, action in enumerate(order) if action.kind is not Kind.F), len(order))
        forwards = (action for action in order if action.kind is Kind.F)
        num_segments = len(self._step.segments[0])
        return frozenset(f for index, f in enumerate(forwards) if index % in_flight >= limit * num_segments)

    def _forward(self, action: Action) -> None:
        step, chunk = self._step, self._placement.chunk_of(action.stage)
        segment = step.segments[action.microbatch][action.segment]
        batches = step.batches[chunk]
        arrived = self._input_of(action)
        is_first_of_chunk = chunk not in self._started_chunks
        self._started_chunks.add(chunk)
        with self._running(action, segment), self._sequence_length_is(segment.length):
            output, _ = forward_step(
                self._losses.observe(step.forward_step_func, segment),
                batches and batches.at(segment),
                step.chunks[chunk],
                len(step.segments),
                arrived,
                self._losses.reports_of(segment),
                step.config,
                cp_group_size=step.context_parallel_size,
                collect_non_loss_data=step.collect_non_loss_data,
                checkpoint_activations_microbatch=None if self._recomputed is None else action in self._recomputed,
                is_first_microbatch=check_first_val_step(step.first_val_step, step.forward_only, is_first_of_chunk),
                current_microbatch=action.microbatch,
                vp_stage=chunk if len(step.chunks) > 1 else None,
                is_last_stage=self._is_last(action.stage),
            )
        if not step.forward_only:
            self._kept[action] = arrived, output
        if not self._is_last(action.stage):
            self._outgoing[action._replace(kind=Kind.SEND_F)] = output

    def _backward(self, action: Action) -> None:
        step = self._step
        segment = step.segments[action.microbatch][action.segment]
        arrived, output = self._kept.pop(action._replace(kind=Kind.F))
        if self._is_last(action.stage):
            gradient, output = None, self._losses.ready_for_backward(output, segment)
        else:
            gradient = self._input_of(action)
        with self._running(action, segment):
            with self._syncing(Kind.I, action), self._weight_gradients.collecting(action[1:]):
                gradient = backward_step(arrived, output, gradient, step.config)
            if action.kind is Kind.B:
                self._compute_weight_gradients(action)
        if action.stage > 0:
            self._outgoing[action._replace(kind=Kind.SEND_B)] = gradient

    def _weight_gradient(self, action: Action) -> None:
        segment = self._step.segments[action.microbatch][action.segment]
        with self._running(action, segment), self._timed("backward-compute"):
            self._compute_weight_gradients(action)

    def _compute_weight_gradients(self, action: Action) -> None:
        """Nothing is left to compute where no backward of the schedule is split: then B had both halves."""
        with self._syncing(Kind.W, action):
            self._weight_gradients.compute(action[1:])

    def _syncing(self, half: Kind, action: Action) -> AbstractContextManager:
        """Around one half of a backward, the input-gradient one (I) or the weight-gradient one (W)."""
        if (half, action) not in self._last:
            return nullcontext()
        return self._sync.last_backward(self._placement.chunk_of(action.stage))

    def _input_of(self, action: Action) -> Tensor | None:
        """The activations or output gradient that an action starts from; waits for the message if there is one."""
        is_forward = action.kind is Kind.F
        source = action.stage + (-1 if is_forward else 1)
        if source < 0:
            return None
        if self._placement.rank_of(source) == self._rank:
            handed = self._outgoing.pop(action._replace(kind=Kind.SEND_F if is_forward else Kind.SEND_B, stage=source))
            tensor = handed.detach()
            self._deallocate(handed, is_forward)
        else:
            receive = action._replace(kind=Kind.RECV_F if is_forward else Kind.RECV_B)
            with self._timed("forward-recv" if is_forward else "backward-recv"):
                tensor = self._communicator.receive(channel_of(receive, self._placement))
        return tensor.requires_grad_(is_forward)

    def _post_receive(self, action: Action) -> None:
        segment = self._step.segments[action.microbatch][action.segment]
        channel = channel_of(action, self._placement)
        self._communicator.post_receive(channel, self._step.message_shape(segment.length))

    def _send(self, action: Action) -> None:
        tensor, is_forward = self._outgoing.pop(action), action.kind is Kind.SEND_F
        with self._timed("forward-send" if is_forward else "backward-send"):
            self._communicator.send(channel_of(action, self._placement), tensor)
        self._deallocate(tensor, is_forward)

    def _deallocate(self, output: Tensor, is_forward: bool) -> None:
        """Of an output that went on to the next stage the graph needs the grad_fn only, not the storage."""
        if is_forward and not self._step.forward_only:
            deallocate_output_tensor(output, self._step.config.deallocate_pipeline_outputs)

    def _gather(self, action: Action) -> None:
        self._sync.before_first_forward(self._placement.chunk_of(action.stage))

    def _reduce(self, action: Action) -> None:
        self._sync.after_last_backward(self._placement.chunk_of(action.stage))

    def _is_last(self, stage: int) -> bool:
        return stage == self._placement.num_stages - 1

    @contextmanager
    def _running(self, action: Action, segment: Segment) -> Iterator[None]:
        span = self._recorder.span(action) if self._recorder else nullcontext()
        with self._context.running(segment, keeps_for_backward=not self._step.forward_only), span:
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Under a name that Megatron's log knows; its `forward_step` and `backward_step` time themselves."""
        timers = self._step.config.timers
        if timers is None:
            yield
            return
        timers(name, log_level=2).start()
        yield
        timers(name).stop()
