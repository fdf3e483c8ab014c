"""Activations in host memory: tensors that a forward keeps for its backward move there, and back in time.

Within the forward of a unit every tensor that autograd saves becomes a handle (`saved_tensors_hooks`), and so do the
results of kept attention and, with the last segment, the keys and values of all. `offload` moves the storages that only
handles refer to, each once; moving parameters, rotary tables or masks would free nothing. The schedule determines when
(schedule/moves.py). Copies overlap with compute. On a GPU the host waits for nothing. On a CPU the memory of the host
is a second pool, so order and lifetimes are those of a GPU.

A unit moves as a whole, or layer by layer: what a layer has saved leaves when it has run, and comes back when the
backward reads what the layer behind it has saved.

    forward:   layer 0 | layer 1 | layer 2 | layer 3 |            backward:   layer 3 | layer 2 | layer 1 | layer 0
    leaves:            |    0         1        2         3        comes back:     2       1         0
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from .copies import Copy
from .host_transfers import HostTransfers, MovedGroup
from .saved_storages import SavedStorages


@dataclass(eq=False)
class _Away:
    """What has left of a unit: the first layers first. It `comes_back` from RELOAD on."""

    groups: list[MovedGroup] = field(default_factory=list)
    has_rest: bool = False  # the last group is what was still in use when the last layer had run
    comes_back: bool = False


class HostMemory:
    """The tensors that forwards keep for their backwards, on device or host, by unit; each unit moves once.

    With `layers_leaving` units move layer by layer: the end of a layer waits until at most so many leave. With 0 units
    move as a whole. A rehearsal, which has no values to move, gives its own `copy` and `new_buffer(num_bytes)`, that of
    a CPU.
    """

    def __init__(
        self,
        layers_leaving: int = 0,
        copy: Copy | None = None,
        new_buffer: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.layers_leaving = layers_leaving
        self._saved = SavedStorages()
        self._transfers = HostTransfers(max(1, layers_leaving), copy, new_buffer)
        self._away: dict[Hashable, _Away] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes on the host now."""
        return self._transfers.num_bytes

    @property
    def most_bytes(self) -> int:
        """The most bytes on the host since the start."""
        return self._transfers.most_bytes

    @property
    def num_unused_blocks(self) -> int:
        """Blocks of the host that hold nothing."""
        return self._transfers.blocks.num_unused

    def keeping(self, unit: Hashable) -> AbstractContextManager[None]:
        """Inside, the forward of `unit` runs, or a part of it; the tensors that autograd saves may move."""
        return self._saved.saving(unit)

    def keep(self, tensor: Any) -> Any:
        """A handle from which `tensor_of` gives the tensor back, or `tensor` itself if it may not move."""
        return self._saved.keep(tensor)

    def end_layer(self) -> None:
        """A layer of the unit that runs has ended: what it has saved leaves, if units move layer by layer."""
        unit = self._saved.running_unit()
        if self.layers_leaving and unit is not None:
            self._leave(unit, nullcontext())

    def offload(self, unit: Hashable, span: AbstractContextManager) -> None:
        """Start moving the tensors of `unit` that are still here; the copies run inside `span`. Raises MemoryError if
        the host is full."""
        rest = self._leave(unit, span)
        self._saved.forget(unit)
        self._away[unit].has_rest = bool(rest.storages)

    def _leave(self, unit: Hashable, span: AbstractContextManager) -> MovedGroup:
        """Start moving what may leave of a unit."""
        self._transfers.make_room()
        group = self._transfers.start_leaving(self._saved.take_movable(unit), span)
        away = self._away.setdefault(unit, _Away())
        if group.storages:
            away.groups.append(group)
            for storage in group.storages:
                storage.bring = partial(self._bring, unit, group)
        return group

    def reload(self, unit: Hashable, span: AbstractContextManager) -> None:
        """Start bringing the tensors of `unit` back; layer by layer those of the last, which goes backward first."""
        away = self._away[unit]
        away.comes_back = True
        if not away.groups:
            self._transfers.bring_nothing(span)
            return
        self._transfers.start_back(away.groups[-1], span)
        if away.has_rest and len(away.groups) > 1:  # the last layer is the group before the rest
            self._transfers.start_back(away.groups[-2], nullcontext())

    def wait(self, unit: Hashable) -> None:
        """Wait until all of `unit` is back, before its backward; layer by layer until its last layer is."""
        away = self._away[unit]
        if away.groups:
            self._bring(unit, away.groups[-1])
        else:
            del self._away[unit]

    def _bring(self, unit: Hashable, group: MovedGroup) -> None:
        """Bring a group of a unit back, with those that left after it, and start to bring the one before it. Raises
        RuntimeError before the unit comes back."""
        away = self._away[unit]
        if not away.comes_back:
            raise RuntimeError("a saved tensor was read while it is in the memory of the host")
        while group in away.groups:
            last = away.groups.pop()
            if last.arrival is None:
                self._transfers.start_back(last, nullcontext())
            last.arrive()
            if self.layers_leaving:
                self._transfers.settle_first()
        if not away.groups:
            del self._away[unit]
        elif away.groups[-1].arrival is None:
            self._transfers.start_back(away.groups[-1], nullcontext())

    def end_backward(self, unit: Hashable) -> None:
        """The backward of a unit that has moved is over. What it has not read is forgotten."""
        if unit in self._away:
            for group in self._away.pop(unit).groups:
                self._transfers.forget(group)

    def clear(self) -> None:
        """Forget everything but the blocks, at the end of a step, which may have failed."""
        groups = [group for away in self._away.values() for group in away.groups]
        self._saved.clear()
        self._away.clear()
        for group in groups:  # there are some after a failure only, which is the one to report
            with suppress(Exception):
                self._transfers.forget(group)
        self._transfers.end_step()

    def assert_empty(self) -> None:
        units = [*self._saved.units, *self._away]
        assert not units, f"activations outlived the step: {units}"
