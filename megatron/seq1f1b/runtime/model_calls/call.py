"""One call of a program's forward step, suspended where the program calls its model.

It runs in a greenlet. When the program calls its model (interception.py), it hands the arguments to the interpreter and
waits; the interpreter runs the model on segments of them, and the call returns when the micro-batch is through. So the
program itself only ever sees whole sequences.

A program may call a reference before its model, as preference losses do. A call is taken for one of a reference

- if it is of another model, which is this stage of a second pipeline,
- in a training step, if it is of the model itself, without gradients,
- in an evaluation, if it is of the model itself, without the wrappers that the schedule was given, or if it follows a
  reference: which call is the last shows when the program ends.

It returns what a forward pass of its own through the pipeline gives (reference.py), and the program goes on.
"""

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from greenlet import getcurrent, greenlet

from .call_arguments import Arguments
from .context_shares import ContextShares
from .routes_of_call import RoutesOfCall
from .thread_state import ThreadState

_NO_ARGUMENTS = Arguments((), {}, ())
_PATIENCE = 8  # times that a program may go on after it was told to end


class Asked(NamedTuple):
    """What a program asks for by a call of a model."""

    model: torch.nn.Module
    arguments: Arguments
    is_direct: bool = False  # whether it calls the model without its wrappers


class Call(greenlet):
    """One call of `forward_step()`, the program's for one micro-batch on one model chunk. `argument_names` are those of
    the model's `forward`, and `where` says in errors which call it is."""

    def __init__(
        self,
        forward_step: Callable[[], Any],
        model: torch.nn.Module,
        argument_names: tuple[str, ...],
        where: str,
        has_wrappers: bool = False,
    ) -> None:
        super().__init__(forward_step)
        self.gr_context = copy_context()  # a greenlet begins with an empty one
        self.model = model
        self.argument_names = argument_names
        self.is_direct = has_wrappers  # whether a call of the model would now be one without its wrappers
        self.reference: torch.nn.Module | None = None  # that waits to be run, before the model
        # Of what calls of references have returned, which a program hands to the next stage with the model's output.
        self.num_reference_elements = 0
        self.arguments = _NO_ARGUMENTS
        self.shares: ContextShares | None = None  # where the arguments were divided among context-parallel ranks
        self.routes: RoutesOfCall | None = None  # that its routers replay or record
        self._where = where
        self._has_head = None  # of a model that says so; looked up without a call, which a unit could feel
        if "post_process" in model.__dict__:
            self._has_head = model.__dict__["post_process"]
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
            if isinstance(output, torch.Tensor):
                self.num_reference_elements += output.numel()
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
        has_gradients = torch.is_grad_enabled() if self._state is None else self._state.has_gradients
        is_own = asked.model is self.model
        attributes = self.model.__dict__
        if is_own and "post_process" in attributes and attributes["post_process"] != self._has_head:
            raise ValueError(
                f"the forward step of {self._where} changes post_process of its model around the call, and others are "
                "under way meanwhile; leave it as it is (in SkyRL, set trainer.fused_lm_head_logprob=false for hybrid "
                "models), or drop --sequence-splits"
            )
        if has_gradients and not is_own and any(weight.requires_grad for weight in asked.model.parameters()):
            raise ValueError(
                f"the forward step of {self._where} calls another model than the schedule was given, and with "
                "gradients; call a reference under torch.no_grad"
            )
        if not is_own:
            is_of_reference = True
        elif needs_gradients:
            is_of_reference = not has_gradients
        else:
            follows_one = self.reference is not None
            is_of_reference = follows_one or asked.is_direct
        self.reference = asked.model if is_of_reference else None
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
        try:
            for _ in range(_PATIENCE):
                if not self:  # not started, or at its end
                    break
                self.parent = getcurrent()
                with suppress(Exception):  # the failure itself is the one to report
                    self.throw()
        finally:
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


def data_ended(where: str) -> ValueError:
    """The error of a forward step, that of `where`, whose data iterator has no more data."""
    return ValueError(
        f"a data iterator ended before {where} of its step; give more data, or run fewer steps (--train-iters, "
        "--eval-iters)"
    )
