"""All calls of a program's forward step in one step.

Tested in runtime/test_call.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from inspect import signature
from typing import Any, Self

import torch

from ..program_contract import ProgramContract
from ..step import Step
from .call import Call
from .call_arguments import Arguments, gather_embeddings
from .context_shares import whole_arguments
from .interception import intercept, model_of
from .routes_of_call import RoutesOfCall


class Calls:
    """The calls of a program's forward step in one step, one for every micro-batch and model chunk. Inside `with`, the
    program's calls of its models are intercepted."""

    def __init__(self, step: Step, contract: ProgramContract) -> None:
        self.models = [model_of(chunk) for chunk in step.chunks]
        self._running: Call | None = None
        self._step = step
        self._contract = contract
        self._started: list[list[Call]] = [[] for _ in step.chunks]
        self._interception = ExitStack()
        self._takes_references = True
        self._replays_routes = getattr(step.config, "moe_enable_routing_replay", False)

    def __enter__(self) -> Self:
        self._forwards = [model.forward for model in self.models]
        self._argument_names = [tuple(signature(forward).parameters) for forward in self._forwards]
        intercept(self._step.chunks, self.models, undo=self._interception)
        return self

    def __exit__(self, *_: Any) -> None:
        self._running = None
        # The stack does all of it, last first, also if a program ends by SystemExit. Programs end before the
        # interception does: one that catches every exception must not run its model then.
        with ExitStack() as undo:
            undo.callback(self._started.clear)
            undo.enter_context(self._interception)
            for calls in reversed(self._started):
                for call in reversed(calls):
                    if call:  # its program has not ended
                        undo.callback(call.close)

    @property
    def running(self) -> Call:
        """The call whose model runs forward."""
        assert self._running is not None, "no model runs"
        return self._running

    def at(self, chunk: int, microbatch: int) -> Call:
        """The call of a micro-batch on a model chunk. A program reads micro-batches in order, whatever the schedule, so
        the calls of earlier ones are started, too."""
        started = self._started[chunk]
        while len(started) <= microbatch:
            self._start(chunk, len(started))
        return started[microbatch]

    def start_all(self) -> None:
        """Start the calls of all micro-batches on all chunks of this rank."""
        for chunk in range(len(self.models)):
            self.at(chunk, self._step.num_microbatches - 1)

    @property
    def references(self) -> set[torch.nn.Module]:
        """The references that calls which are started wait for."""
        called = [call.reference for calls in self._started for call in calls]
        return {reference for reference in called if reference is not None}

    @property
    def have_ended(self) -> bool:
        """Whether the programs have ended, and the calls that looked like those of a reference were of their model.
        Raises ValueError if only some have ended."""
        ended = {call.dead for calls in self._started for call in calls}
        if len(ended) > 1:
            raise ValueError(
                "the forward steps of some micro-batches call their model twice, and those of others once, but one "
                "pass through the pipeline serves all micro-batches; call it equally often in each"
            )
        return ended == {True}

    def end_references(self) -> None:
        """From now on a call that waits for a reference is an error."""
        self._takes_references = False

    def go_on(self, chunk: int, microbatch: int, output: Any) -> Any:
        """Let the call of a reference return `output`, and the program go on to its next call. If it ends instead, the
        result of its forward step, else None."""
        call = self._started[chunk][microbatch]
        if call.routes is not None:
            call.routes.return_recorded(self._step.segments[microbatch])
        with self._around(chunk, microbatch):
            result = call.go_on(output, needs_gradients=not self._step.forward_only)
        if not call.dead:
            self._make_whole(call)
        return result

    def run(self, chunk: int, call: Call, arguments: Arguments, forward: Callable[..., Any] | None = None) -> Any:
        """The output of the model of a chunk, by its own `forward` unless another is given, for a part of the call's
        arguments."""
        self._running = call
        own = self._forwards[chunk] if call.reference in (None, call.model) else call.reference
        return call.run_model(forward or own, arguments)

    def finish(self, chunk: int, microbatch: int, output: Any) -> Any:
        """Let the model of a micro-batch return `output`; the result of its forward step."""
        call = self._started[chunk][microbatch]
        if call.routes is not None:
            call.routes.return_recorded(self._step.segments[microbatch])
        with self._around(chunk, microbatch):
            return call.finish(output)

    def _start(self, chunk: int, microbatch: int) -> None:
        step = self._step
        model = self.models[chunk]

        def forward_step() -> Any:
            with step.autocast():
                return step.forward_step_func(step.iterators[chunk], step.chunks[chunk])

        call = Call(
            forward_step=forward_step,
            model=model,
            argument_names=self._argument_names[chunk],
            where=f"micro-batch {microbatch}",
            has_wrappers=step.chunks[chunk] is not model,
        )
        self._started[chunk].append(call)  # to be closed, also if it fails
        with self._around(chunk, microbatch):
            call.start(needs_gradients=not step.forward_only)
        if call.reference is not None and not self._takes_references:
            raise ValueError(
                f"the forward step of micro-batch {microbatch} calls a reference, and that of micro-batch 0 none, but "
                "one pass through the pipeline serves all micro-batches; call it in each"
            )
        self._make_whole(call)

    def _make_whole(self, call: Call) -> None:
        """Gather what other ranks have of the arguments, and of the routes that a program replays."""
        step = self._step
        if step.sequence_parallel is not None:
            call.arguments = gather_embeddings(call.arguments, step.sequence_parallel)
        if step.groups.cp.size() > 1:
            call.arguments, call.shares = whole_arguments(
                call.arguments, step.groups.cp, self._contract.divides_documents, step.device
            )
        if self._replays_routes:
            call.routes = RoutesOfCall(
                model=call.reference or call.model,
                shares=call.shares,
                sequence_parallel=step.sequence_parallel,
            )

    def _around(self, chunk: int, microbatch: int) -> AbstractContextManager:
        stage = self._step.placement.stage_of(self._step.rank, chunk)
        return self._contract.around_program(stage, self._step.length_of(microbatch))
