"""A program's forward step, suspended where it calls its model.

`forward_step_func(iterator, model)` runs once for every micro-batch and model chunk, in a greenlet. The model that it
calls is a door: the call hands its arguments to the interpreter, which runs the model on segments of them, and returns
when the micro-batch is through. Whatever the program does before and after, it does with whole sequences.

A program may first call a reference, as preference losses do: this stage of another pipeline of the same kind, or the
model itself, in a training step without gradients, in an evaluation without the wrappers that the schedule was given.
That call returns what a pass of its own gives (reference.py), and the program goes on to the call of its model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from contextvars import copy_context
from inspect import signature
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet

from ..process.patches import patched_in, patched_on, wrapping
from .context_shares import ContextShares, whole_arguments
from .cut import Arguments, gather_embeddings
from .program_contract import ProgramContract
from .step import Step
from .thread_state import ThreadState

_NO_ARGUMENTS = Arguments((), {}, ())
_PATIENCE = 8  # times that a program may go on after it was told to end


class Asked(NamedTuple):
    """The model that a program calls, and the arguments; whether it calls the model without its wrappers."""

    model: torch.nn.Module
    arguments: Arguments
    is_direct: bool = False


class Call(greenlet):
    """One call of `forward_step()`, the program's for one micro-batch on one model chunk. `parameters` are the names of
    those of the model, and `where` says which call it is."""

    def __init__(
        self,
        forward_step: Callable[[], Any],
        model: torch.nn.Module,
        parameters: Sequence[str],
        where: str,
        has_wrappers: bool = False,
    ) -> None:
        super().__init__(forward_step)
        self.gr_context = copy_context()  # a greenlet begins with an empty one
        self.model = model
        self.parameters = parameters
        self.is_direct = has_wrappers  # whether a call of the model would now be one without its wrappers
        self.reference: torch.nn.Module | None = None  # that waits to be run, before the model
        self.num_references = 0  # that the program has called
        self.arguments = _NO_ARGUMENTS
        self.shares: ContextShares | None = None  # where the arguments were divided among context-parallel ranks
        self._where = where
        self._state: ThreadState | None = None  # of the program, if it differs from that of the interpreter

    def start(self, needs_gradients: bool) -> None:
        """Run the program until it calls its model or a reference. Raises ValueError if it calls none, or where it
        cannot wait."""
        was_inferring = torch.is_inference_mode_enabled()
        try:
            asked = self._switch()
        except StopIteration as error:
            raise data_ended(self._where) from error
        if self.dead:
            raise ValueError(
                f"the forward step of {self._where} returned without a call of its model, and segments are cut at that "
                "call; call the model that the schedule was given, or drop --sequence-splits"
            )
        self._take(asked, needs_gradients, was_inferring)

    def go_on(self, output: Any, needs_gradients: bool) -> Any:
        """Let the call of the reference return `output`, and run the program until its next call. In an evaluation the
        program may end instead, since the model itself was no reference: then the result of its forward step, else
        None. Raises ValueError if a program ends in a training step."""
        was_inferring = torch.is_inference_mode_enabled()
        given = self._switch(output)
        if not self.dead:  # so it is what the program calls next
            self.num_references += 1
            self._take(given, needs_gradients, was_inferring)
            return None
        if needs_gradients:
            raise ValueError(
                f"the forward step of {self._where} calls its model without gradients in a training step; run it with "
                "forward_only=True, or call the model outside of torch.no_grad"
            )
        self.reference = None
        self.arguments = _NO_ARGUMENTS
        return given

    def _take(self, asked: Asked, needs_gradients: bool, was_inferring: bool) -> None:
        """Note which call the program waits for, of a reference or of its model. Raises ValueError for one that cannot
        be run by segments."""
        if torch.is_inference_mode_enabled() and not was_inferring:
            raise ValueError(
                f"the forward step of {self._where} calls its model under torch.inference_mode, whose tensors cannot "
                "pass from segment to segment; use torch.no_grad"
            )
        has_gradients = self._state is None or self._state.has_gradients
        is_own = asked.model is self.model
        if has_gradients and not is_own and any(weight.requires_grad for weight in asked.model.parameters()):
            raise ValueError(
                f"the forward step of {self._where} calls another model than the schedule was given, and with "
                "gradients; call a reference under torch.no_grad"
            )
        is_as_the_model = has_gradients if needs_gradients else not asked.is_direct
        self.reference = None if is_own and is_as_the_model else asked.model
        self.arguments = asked.arguments

    def run_model(self, forward: Callable[..., Any], arguments: Arguments) -> Any:
        """The output of a forward, with gradients and autocast on or off as where the program called its model."""
        if self._state is None:
            return forward(*arguments.positional, **arguments.named)
        own = ThreadState.now()
        self._state.make_current(instead_of=own)
        try:
            return forward(*arguments.positional, **arguments.named)
        finally:
            own.make_current(instead_of=self._state)

    def finish(self, output: Any) -> Any:
        """Let the call of the model return `output`; the result of the program's forward step. Raises ValueError if it
        calls the model again."""
        self.arguments = _NO_ARGUMENTS  # which nothing else holds now
        result = self._switch(output)
        if not self.dead:
            raise ValueError(
                f"the forward step of {self._where} calls its model twice, and segments are cut at one call; put both "
                "batches into one call or into two micro-batches, or drop --sequence-splits"
            )
        return result

    def close(self) -> None:
        """End a program that is suspended, after a failure elsewhere: its `finally` blocks run."""
        own = ThreadState.now()
        for _ in range(_PATIENCE):
            if not self:  # not started, or at its end
                break
            self.parent = getcurrent()
            with suppress(Exception):  # the failure itself is the one to report
                self.throw()
        own.make_current(instead_of=ThreadState.now())

    def _switch(self, *given: Any) -> Any:
        """Go on with the program until it calls its model or ends; the state of this thread is that of whoever runs."""
        self.parent = getcurrent()
        own = ThreadState.now()
        if self._state is not None:
            self._state.make_current(instead_of=own)
        try:
            return self.switch(*given)
        finally:
            left = ThreadState.now()
            self._state = left if left != own else None
            own.make_current(instead_of=left)


class Calls:
    """The calls of a program's forward step in one step. Within it, the models of all chunks are doors."""

    def __init__(self, step: Step, contract: ProgramContract) -> None:
        self.models = [model_of(chunk) for chunk in step.chunks]
        self._running: Call | None = None
        self._step = step
        self._contract = contract
        self._started: list[list[Call]] = [[] for _ in step.chunks]
        self._doors = ExitStack()
        self._takes_references = True

    def __enter__(self) -> "Calls":
        self._forwards = [model.forward for model in self.models]
        self._parameters = [tuple(signature(forward).parameters) for forward in self._forwards]
        door = wrapping("torch.nn.Module.forward", _at_the_door, "runs on whole sequences")
        self._doors.enter_context(patched_on(self.models, [door]))
        wrappers = [chunk for chunk, model in zip(self._step.chunks, self.models, strict=True) if chunk is not model]
        if wrappers:
            door = wrapping("torch.nn.Module.forward", _in_the_wrappers, "calls the model as the schedule was given it")
            self._doors.enter_context(patched_on(wrappers, [door]))
        # A reference is known when it is called. Of a pipeline of one stage it runs on whole sequences by itself.
        stages = [model for model in self.models if not _is_whole(model)]
        door = wrapping("torch.nn.Module.forward", _at_the_door_of_a_class, "runs on whole sequences")
        self._doors.enter_context(patched_in({type(model) for model in stages}, door))
        return self

    def __exit__(self, *_: Any) -> None:
        # While a program ends, its model is still a door: one that catches everything must not run it.
        for calls in self._started:
            for call in calls:
                call.close()
        self._doors.close()
        self._started.clear()
        self._running = None

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
    def wait_for_references(self) -> bool:
        """Whether the calls that are started wait for references."""
        return any(call.reference is not None for calls in self._started for call in calls)

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
        with self._around(chunk, microbatch):
            return self._started[chunk][microbatch].finish(output)

    def _start(self, chunk: int, microbatch: int) -> None:
        step = self._step
        model = self.models[chunk]

        def forward_step() -> Any:
            with step.autocast():
                return step.forward_step_func(step.iterators[chunk], step.chunks[chunk])

        call = Call(
            forward_step=forward_step,
            model=model,
            parameters=self._parameters[chunk],
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
        """Gather what the arguments have of other ranks."""
        step = self._step
        if step.sequence_parallel is not None:
            call.arguments = gather_embeddings(call.arguments, step.sequence_parallel)
        if step.groups.cp.size() > 1:
            call.arguments, call.shares = whole_arguments(
                call.arguments, step.groups.cp, self._contract.divides_documents, step.device
            )

    def _around(self, chunk: int, microbatch: int) -> AbstractContextManager:
        stage = self._step.placement.stage_of(self._step.rank, chunk)
        return self._contract.around_program(stage, self._step.length_of(microbatch))


def model_of(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model in the wrappers of a model chunk, which takes the input of its stage by `set_input_tensor`. Raises
    ValueError if it was compiled as a whole."""
    for module in chunk.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                "the model was compiled as a whole by torch.compile, and segments are cut at its call; compile its "
                "layers instead"
            )
        if hasattr(type(module), "set_input_tensor") and not hasattr(module, "module"):
            return module
    raise ValueError(
        f"a {type(chunk).__name__} holds no model with a set_input_tensor, which gets the input of its stage by it"
    )


def data_ended(where: str) -> ValueError:
    """The error of a forward step, that of `where`, whose data iterator has no more data."""
    return ValueError(
        f"a data iterator ended before {where} of its step; give more data, or run fewer steps (--train-iters, "
        "--eval-iters)"
    )


def _at_the_door(model: torch.nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """A call by a program waits for the interpreter; any other one runs the model."""
    call = getcurrent()
    if isinstance(call, Call) and call.model is model and call.parent is not None:  # it has one while it runs
        return call.parent.switch(Asked(model, _arguments(call, args, kwargs), call.is_direct))
    return forward(*args, **kwargs)


def _in_the_wrappers(wrappers: torch.nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """A call of the model from within its wrappers is no direct one."""
    call = getcurrent()
    if not isinstance(call, Call):
        return forward(*args, **kwargs)
    call.is_direct = False
    try:
        return forward(*args, **kwargs)
    finally:
        call.is_direct = True


def _at_the_door_of_a_class(forward: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Like `_at_the_door`, for models that are no chunks of the step: a program may call this stage of a reference."""
    call = getcurrent()
    if isinstance(call, Call) and call.parent is not None and call.model is not model:
        own: Any = call.model
        if (own.pre_process, own.post_process) == (model.pre_process, model.post_process):
            return call.parent.switch(Asked(model, _arguments(call, args, kwargs)))
    return forward(model, *args, **kwargs)


def _arguments(call: Call, args: tuple, kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call of the model; those that it takes by `*args` have empty names."""
    names = list(call.parameters[: len(args)])
    names += [""] * (len(args) - len(names))
    return Arguments(args, kwargs, tuple(names))


def _is_whole(model: Any) -> bool:
    """Whether a model has all layers from the tokens to the loss, as far as it says so."""
    return getattr(model, "pre_process", True) and getattr(model, "post_process", True)
