"""The ends of layers in a forward.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module, ModuleList


@contextmanager
def at_ends_of_layers(chunks: Iterable[Module], call: Callable[[], object]) -> Iterator[None]:
    """Inside, `call` is called whenever a layer of the model chunks has run forward."""

    def after(*_: Any) -> None:
        call()

    hooks = [layer.register_forward_hook(after) for chunk in chunks for layer in _layers(chunk)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _layers(chunk: Module) -> Iterator[Module]:
    """Megatron's blocks of layers, those of prediction heads too, call their list of layers by this name."""
    for path, module in chunk.named_modules():
        if isinstance(module, ModuleList) and path.rpartition(".")[2] == "layers":
            yield from module
