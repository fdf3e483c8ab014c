"""The running segment, and all that modules keep for the units in flight, in one object of the executor.

Tested in model/test_segment_attention.py by test_segments_equal_one_softmax.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .carried import Carried
from .masks import MaskCheck
from .memory.host_memory import HostMemory
from .memory.weight_gradient import WeightGradientStore
from .packed_documents import Documents

# The output and the statistics of first forwards, as HostMemory keeps them, by unit and layer; and the state of the
# random generator behind them, None if attention draws nothing.
KeptAttention = dict[Hashable, tuple[list[Any], Tensor | None]]


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `end` of every sequence of a micro-batch: its segment number `index`. Numbers count from 0.

    `documents` are those of the whole micro-batch if sequences are packed. `calls` are kernel calls for it, the same in
    all attention layers.
    """

    microbatch: int
    index: int
    start: int
    end: int
    sequence_length: int
    documents: Documents | None = None
    calls: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _shared: dict[Hashable, TensorWeakRef] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence_length

    @property
    def is_whole_sequence(self) -> bool:
        return self.is_first and self.is_last

    def shared(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A constant of this segment, shared by model chunks while a backward needs it."""
        constant = self._shared[name]() if name in self._shared else None
        if constant is None:
            constant = make()
            self._shared[name] = TensorWeakRef(constant)
        return constant


class SegmentContext:
    """The running segment, and the state of layers for the micro-batches in flight.

    A segment runs during the forward and during the backward of its unit, since recomputation runs a forward inside the
    backward. Between units there is no running segment, and modules treat their input as whole sequences. The context
    has what layers carry from segment to segment (carried.py) until nothing uses it. With `keeps_attention`,
    recomputation finds the attention of first forwards.
    """

    def __init__(self, keeps_attention: bool = False, host_memory: HostMemory | None = None) -> None:
        self.host_memory = host_memory or HostMemory()
        self.weight_gradients = WeightGradientStore()
        self.segment: Segment | None = None
        self.keeps_for_backward = True
        # Whether backwards of the running step are split, and keep inputs and output gradients for W.
        self.splits_backwards = False
        self.kept_attention: KeptAttention | None = {} if keeps_attention else None
        self.masks = MaskCheck()
        self._carried: dict[tuple[Hashable, int], Carried] = {}  # by layer and micro-batch
        self._routes: dict[tuple[Hashable, int], Any] = {}  # by router and micro-batch

    @property
    def running_segment(self) -> Segment:
        """The running segment, for what is called only while there is one."""
        assert self.segment is not None, "no segment runs"
        return self.segment

    def running(
        self, segment: Segment, keeps_for_backward: bool, unit: Hashable = None, moves: bool = False
    ) -> "_Running":
        """Inside, `segment` runs; no backward follows (evaluation) unless `keeps_for_backward`. A split backward leaves
        weight gradients for `unit`. If the unit `moves`, the tensors that its forward saves may go to the host."""
        return _Running(
            context=self,
            segment=segment,
            keeps_for_backward=keeps_for_backward,
            unit=unit,
            moves=moves,
        )

    def carried(self, layer: Hashable, make: Callable[[], Any]) -> Any:
        """What `layer` carries for the running micro-batch, made at its first segment."""
        key = layer, self.running_segment.microbatch
        if key not in self._carried:
            self._carried[key] = make()
        return self._carried[key]

    def has_backward(self, output: Tensor) -> bool:
        """Whether a backward of the running segment passes through the `output` of a layer: not in an evaluation, nor
        if all weights below are frozen. In training, a forward without gradients is one that the backward repeats."""
        return self.keeps_for_backward and (output.requires_grad or not torch.is_grad_enabled())

    def end_forward(self, layer: Hashable, output: Tensor) -> None:
        """Called when the running segment has gone forward through a `layer`, which gave `output`: let go of what
        nothing uses again, and let the rest move to the host after the last segment."""
        segment = self.running_segment
        key = layer, segment.microbatch
        has_backward = self.has_backward(output)
        if segment.is_last and not has_backward:
            del self._carried[key]
            return
        carried = self._carried[key]
        carried.end_forward(output.requires_grad, has_backward)
        if segment.is_last:
            carried.to_host(self.host_memory.keep)

    def at_end_of_backward(self, layer: Hashable) -> Callable[[], object]:
        """A function to call at the end of the running segment's backward. If it is the first segment, the last one to
        go backward, the layer carries nothing from then on."""
        segment = self.running_segment
        return partial(self._carried.pop, (layer, segment.microbatch)) if segment.is_first else _nothing

    def all_carried(self) -> list[Carried]:
        """What all layers carry for the micro-batches in flight."""
        return list(self._carried.values())

    def take_routes(self, microbatch: int, by_router: Mapping[Any, Any]) -> None:
        """Note what routers replay or record for a micro-batch (layers/replayed_routes.py), until the step ends."""
        for router, routes in by_router.items():
            self._routes[router, microbatch] = routes

    def routes_of(self, router: Hashable) -> Any:
        """What a router replays or records in the running segment; None if nothing, or if no segment runs."""
        if self.segment is None or not self._routes:
            return None
        return self._routes.get((router, self.segment.microbatch))

    def clear(self) -> None:
        """Forget everything, at the end of a step, also of one that failed."""
        self.splits_backwards = False
        self._carried.clear()
        self._routes.clear()
        self.masks = MaskCheck()
        if self.kept_attention:
            self.kept_attention.clear()
        self.weight_gradients.clear()
        self.host_memory.clear()

    def assert_empty(self) -> None:
        assert not self._carried, f"what {len(self._carried)} layers carry outlived the step"
        assert not self.kept_attention, f"the attention of {len(self.kept_attention)} forwards was kept and not used"
        self.weight_gradients.assert_empty()
        self.host_memory.assert_empty()


def _nothing() -> None:
    pass


class _Running:
    """The context of `SegmentContext.running`; a class, since a generator would take the host several times as long."""

    __slots__ = ("_context", "_keeping", "_keeps_for_backward", "_segment", "_unit")

    def __init__(
        self, context: SegmentContext, segment: Segment, keeps_for_backward: bool, unit: Hashable, moves: bool
    ) -> None:
        self._context = context
        self._segment = segment
        self._keeps_for_backward = keeps_for_backward
        self._unit = unit
        self._keeping = context.host_memory.keeping(unit) if moves else None

    def __enter__(self) -> None:
        context = self._context
        context.segment = self._segment
        context.keeps_for_backward = self._keeps_for_backward
        context.weight_gradients.unit = self._unit
        if self._keeping is not None:
            self._keeping.__enter__()

    def __exit__(self, *failure: Any) -> None:
        if self._keeping is not None:
            self._keeping.__exit__(*failure)
        self._context.segment = None
        self._context.weight_gradients.unit = None
