"""The ends of layers in a forward.

Tested in functional_tests/test_equality.py by test_a_step.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet

from torch.nn import Module, ModuleList


class LayerEnds:
    """Calls `at_end()` whenever a layer of a model chunk that it follows has run forward."""

    def __init__(self, at_end: Callable[[], object]) -> None:
        self._at_end = at_end
        self._followed: WeakSet[Module] = WeakSet()

    def follow(self, chunks: Iterable[Module]) -> None:
        """Follow these model chunks from now on."""
        for chunk in chunks:
            if chunk not in self._followed:
                self._followed.add(chunk)
                for layer in _layers(chunk):
                    layer.register_forward_hook(self._after_layer)

    def _after_layer(self, *_: Any) -> None:
        self._at_end()


def _layers(chunk: Module) -> Iterator[Module]:
    """Megatron's blocks of layers, those of prediction heads too, call their list of layers by this name."""
    for path, module in chunk.named_modules():
        if isinstance(module, ModuleList) and path.rpartition(".")[2] == "layers":
            yield from module
