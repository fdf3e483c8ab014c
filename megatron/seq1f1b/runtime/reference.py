"""Reference models that a program calls before its own: they run forward for all micro-batches first, by segments.

Preference losses (DPO) compare with a model that does not train, or with the model without its adapters. The stages of
that reference form a pipeline of their own, in which an evaluation runs before the step. The program's calls of the
reference then return all at once, since the program may have switched adapters off for them. The last call returns
first, in the order in which nested contexts end.

Tested in functional_tests/test_references.py by test_a_reference_runs_by_segments.
"""

from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from typing import Any

import torch

from ..model import SegmentContext
from ..process.patches import patched
from .communication import Communicator
from .forwards.forward_segments import SegmentForwards
from .forwards.loss import Losses
from .forwards.multi_token import prediction_patches
from .gradients.gradient_sync import gradient_syncs
from .interpreter import Interpreter
from .model_calls.call import Call
from .model_calls.call_arguments import size_of
from .model_calls.calls import Calls
from .rank_schedule import RankSchedule
from .recording.recorder import Recorder
from .step import Step


def run_references(
    step: Step,
    calls: Calls,
    schedule_of: Callable[[Step], RankSchedule],
    communicator: Communicator,
    context: SegmentContext,
    follows_segments: bool,
    prepare: Callable[[Step, Calls], None],
    cut_again: Callable[[], None] | None,
) -> Losses:
    """Run the references that the programs of a step call, until all programs wait for their model.

    `schedule_of(step)` gives the actions of this rank, and `prepare(step, calls)` lets the references that all calls
    wait for run by them. `cut_again()` cuts the step for what the programs call next, which may have other sequences or
    documents; without it all calls of a program have the same. In an evaluation the programs may end instead, if what
    they called was no reference, but their model without its wrappers. Then `calls.have_ended`, and the result has
    their losses; otherwise it is empty.
    """
    losses = Losses(step)
    calls.at(0, 0)  # tells whether the programs of the step call a reference
    while calls.references:
        calls.start_all()
        prepare(step, calls)
        evaluation = _without_gradients(step)
        forwards = ReferenceForwards(
            step=evaluation,
            context=context,
            losses=losses,
            calls=calls,
            follows_segments=follows_segments,
        )
        with ExitStack() as around:
            syncs = gradient_syncs(step.config, step.chunks)
            for sync in syncs:
                around.callback(sync.close)
            around.enter_context(torch.no_grad())
            around.enter_context(patched(prediction_patches(evaluation, context, calls)))
            Interpreter(
                step=evaluation,
                schedule=schedule_of(evaluation),
                communicator=communicator,
                context=context,
                forwards=forwards,
                syncs=syncs,
                recorder=around.enter_context(Recorder(step.device)),
            ).run()
        forwards.return_all(may_resize=cut_again is not None)
        if calls.have_ended:
            context.masks.settle()
            return losses
        if cut_again is not None:
            cut_again()
    calls.end_references()
    return losses


def references_of_chunks(step: Step, calls: Calls) -> list[Any]:
    """The stages of the reference on this rank, by model chunk. Raises ValueError where micro-batches differ in whether
    they call it."""
    of_chunks = []
    for chunk in range(len(step.chunks)):
        references = [calls.at(chunk, number).reference for number in range(step.num_microbatches)]
        first = references[0]
        if first is None or any(reference is not first for reference in references):
            raise ValueError(
                "the forward steps of a step call different references, or some of them none, but one pass through the "
                "pipeline serves all micro-batches; call the same reference in each"
            )
        of_chunks.append(first)
    return of_chunks


def _without_gradients(step: Step) -> Step:
    """The same step as an evaluation."""
    evaluation = copy(step)
    evaluation.forward_only = True
    evaluation.first_val_step = None
    return evaluation


class ReferenceForwards(SegmentForwards):
    """Keeps what the calls of the reference are to return until `return_all`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._results: dict[tuple[int, int], Any] = {}  # of the calls, by (model chunk, micro-batch)

    def return_all(self, may_resize: bool) -> None:
        """Let all calls of the reference return, and take the losses of programs that end. Raises ValueError if a
        program then makes a call for sequences of another size, unless it `may_resize`."""
        for chunk, microbatch in sorted(self._results, reverse=True):
            call = self._calls.at(chunk, microbatch)
            size = size_of(call.arguments)
            result = self._calls.go_on(chunk, microbatch, self._results.pop((chunk, microbatch)))
            if call.dead:
                if self._chunk_of.get(self._last_stage) == chunk:
                    self._losses.add(chunk, microbatch, *result)
            elif not may_resize and size_of(call.arguments) != size:
                raise ValueError(
                    f"the forward step of micro-batch {microbatch} calls its reference and its model for sequences of "
                    "different sizes; call both for the same sequences"
                )

    def _return_to_program(self, call: Call, chunk: int, stage: int, microbatch: int, output: Any) -> None:
        if stage == self._last_stage:
            self._results[chunk, microbatch] = self._outputs.pop(microbatch).joined()
        else:
            self._results[chunk, microbatch] = output.detach()
