"""Interception of a program's calls of its model: the program waits at its call, and the interpreter goes on.

Tested in runtime/test_call.py.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from greenlet import getcurrent

from ...process.patches import patched_in, patched_on, wrapping
from .call import Asked, Call
from .call_arguments import Arguments


def intercept(chunks: Sequence[torch.nn.Module], models: Sequence[torch.nn.Module], undo: ExitStack) -> None:
    """Until `undo` closes, intercept calls of the `models` in the wrappers of the model `chunks`, and of references."""
    forward = "torch.nn.Module.forward"
    undo.enter_context(patched_on(models, [wrapping(forward, _called, "runs on whole sequences")]))
    wrappers = [chunk for chunk, model in zip(chunks, models, strict=True) if chunk is not model]
    if wrappers:
        noting = wrapping(forward, _called_in_wrappers, "calls the model as the schedule was given it")
        undo.enter_context(patched_on(wrappers, [noting]))
    # Which object is a reference shows when it is called, so its class is patched. The reference of a pipeline of one
    # stage runs on whole sequences by itself.
    classes = {type(model) for model in models if not _is_whole(model)}
    undo.enter_context(patched_in(classes, wrapping(forward, _called_as_reference, "runs on whole sequences")))


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


def _called(model: torch.nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """A model is called: by a program, which waits for the output, or by the interpreter, for which it runs."""
    call = getcurrent()
    if isinstance(call, Call) and call.model is model and call.parent is not None:  # it has one while it runs
        return call.parent.switch(Asked(model, _arguments(call, args, kwargs), call.is_direct))
    return forward(*args, **kwargs)


def _called_in_wrappers(wrappers: torch.nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """The wrappers of a model are called: what they call is no direct call of the model."""
    call = getcurrent()
    if not isinstance(call, Call):
        return forward(*args, **kwargs)
    call.is_direct = False
    try:
        return forward(*args, **kwargs)
    finally:
        call.is_direct = True


def _called_as_reference(forward: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Like `_called`, for models of the same class that are no chunks of the step: this stage of a reference."""
    call = getcurrent()
    if isinstance(call, Call) and call.parent is not None and call.model is not model:
        own: Any = call.model
        if (own.pre_process, own.post_process) == (model.pre_process, model.post_process):
            return call.parent.switch(Asked(model, _arguments(call, args, kwargs)))
    return forward(model, *args, **kwargs)


def _arguments(call: Call, args: tuple, kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call of the model; those that it takes by `*args` have empty names."""
    num_given = len(args)
    names = call.argument_names[:num_given]
    unnamed = ("",) * (num_given - len(names))
    return Arguments(args, kwargs, names + unnamed)


def _is_whole(model: Any) -> bool:
    """Whether a model has all layers from the tokens to the loss, as far as it says so."""
    return getattr(model, "pre_process", True) and getattr(model, "post_process", True)
