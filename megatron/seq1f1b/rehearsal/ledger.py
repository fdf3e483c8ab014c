"""The bytes in memory at every moment of a step, from the births and deaths of storages, and the step's messages."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..model import context_of
from ..runtime import StepRecorder, StepTracer
from ..schedule import MOVE_KINDS, Action, Kind, Shape

_SEND = torch.ops.c10d.send.default
_RECEIVE = torch.ops.c10d.recv_.default
_FLASH_BACKWARD = torch.ops.aten._flash_attention_backward.default
_ROWS = 128  # flash attention rounds the number of queries up to this


class Category(StrEnum):
    """The content of a storage."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    STATE = "keys and values"
    LOGITS = "logits"
    MESSAGES = "messages"
    TEMPORARY = "temporaries"


@dataclass(frozen=True)
class Moment:
    """One action of a step: bytes by category at its highest point, and all bytes when it ends."""

    name: str
    peak: dict[Category, int]
    end: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


@dataclass(frozen=True)
class MessageEnd:
    """One end of a message, as it was posted. A channel is a queue without tags from one global rank to another, in one
    process group."""

    source: int
    destination: int
    channel: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    moment: str


@dataclass(slots=True, eq=False)
class _Allocation:
    """The memory of a storage of one size; `moment` is the number of the moment of its birth."""

    size: int
    category: Category | None
    moment: int


class _Change(NamedTuple):
    """The birth or the death of an allocation."""

    allocation: _Allocation
    is_birth: bool


class _RunningMoment(NamedTuple):
    """A moment, and the changes in it so far."""

    name: str
    changes: list[_Change]


class Ledger(TorchDispatchMode, StepTracer, StepRecorder):
    """Counts the bytes of storages while they live, and records messages when they are sent or their receive is posted.

    Bytes are those of tensors, not of an allocator's blocks, and those that flash attention allocates during a call.
    `run(function, args, kwargs)` runs an operator. The ledger is the tracer and the recorder of the rehearsed step.
    """

    def __init__(
        self, run: Callable[[Any, tuple, dict], Any] = lambda function, args, kwargs: function(*args, **kwargs)
    ) -> None:
        super().__init__()
        self.sent: list[MessageEnd] = []
        self.received: list[MessageEnd] = []
        self.stages: list[int] = []
        self.groups: set[str] = set()  # process groups of several ranks that were used
        self._run = run
        self._moments: list[_RunningMoment] = []
        self._default = Category.ACTIVATIONS  # the category of new storages until they are labelled
        self._alive: dict[int, tuple[_Allocation, weakref.ref]] = {}
        self._chunks: list[torch.nn.Module] = []
        self._last_stage = 0

    def begin(self, moment: str, default: Category = Category.ACTIVATIONS) -> None:
        """Start a moment; storages that are born in it hold `default` until they are labelled."""
        self._moments.append(_RunningMoment(moment, []))
        self.fill_with(default)

    def fill_with(self, default: Category) -> None:
        self._default = default

    def label(self, tree: Any, category: Category | None) -> None:
        """Set the category of the tensors in `tree`, from their births on; None is for tensors of the host."""
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor):
                continue
            alive = self._alive.get(leaf.untyped_storage()._cdata)
            if alive is not None:
                allocation, _ = alive
                allocation.category = category

    def resize(self, resize: Callable, storage: torch.UntypedStorage, size: int) -> Any:
        """`torch.UntypedStorage.resize_`, which no operator shows, counted."""
        alive = self._alive.get(storage._cdata)
        if alive is not None:
            allocation, reference = alive
            category = allocation.category  # as it was: what dies young becomes a temporary
            self._dies(allocation)
            self._alive[storage._cdata] = self._is_born(size, category), reference
        return resize(storage, size)

    def as_one_kernel(self, function: Callable, *args: Any, **options: Any) -> Any:
        """Call a function that a GPU runs as one kernel: storages that it allocates and frees do not count."""
        changes = self._moments[-1].changes
        first = len(changes)
        result = function(*args, **options)
        in_call = changes[first:]
        born = {change.allocation for change in in_call if change.is_birth}
        died = {change.allocation for change in in_call if not change.is_birth}
        changes[first:] = [change for change in in_call if change.allocation not in born & died]
        return result

    def moments(self) -> list[Moment]:
        """The moments in order, with what is held in each."""
        held = dict.fromkeys(Category, 0)
        in_all = 0
        moments = []
        for name, changes in self._moments:
            highest = in_all
            peak = dict(held)
            for allocation, is_birth in changes:
                if allocation.category is None:
                    continue
                size = allocation.size if is_birth else -allocation.size
                held[allocation.category] += size
                in_all += size
                if in_all > highest:
                    highest = in_all
                    peak = dict(held)
            used = {category: num_bytes for category, num_bytes in peak.items() if num_bytes}
            moments.append(Moment(name, peak=used, end=in_all))
        return moments

    @contextmanager
    def step(
        self, _: str, shape: Shape, chunks: Iterable[torch.nn.Module], group: dist.ProcessGroup, *__: Any
    ) -> Iterator["Ledger"]:
        """Follow a step, as `StepTracer.step`; the caches of `chunks` hold keys and values, their output layers make
        logits."""
        self._chunks = list(chunks)
        self.stages = shape.placement.stages_of(group.rank())
        self._last_stage = shape.num_stages - 1
        for chunk in self._chunks:
            for name, module in chunk.named_modules():
                if name.rpartition(".")[2] == "output_layer":
                    module.register_forward_pre_hook(self._logits_begin)
        yield self

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """A context whose body is `action`, as `StepRecorder.span`. Copies run in threads and belong to the moments
        around them."""
        if action.kind in MOVE_KINDS:
            yield
            return
        # The last stage's backward makes gradients of logits until it has the gradient of the output layer's input.
        starts_at_logits = action.kind is not Kind.F and action.stage == self._last_stage
        self.begin(str(action), Category.LOGITS if starts_at_logits else Category.ACTIVATIONS)
        yield
        self.label(_carried_by_layers(self._chunks), Category.STATE)
        self.begin(f"after {action}")

    def _logits_begin(self, _: Any, inputs: tuple) -> None:
        self.fill_with(Category.LOGITS)
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self.fill_with(Category.ACTIVATIONS))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and checking for that takes time at every operator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._run(function, args, kwargs or {})
        if function.namespace == "c10d":
            self._communicates(function, args)
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                storage = item.untyped_storage()
                key = storage._cdata
                size = storage.nbytes()
                if size and key not in self._alive:
                    allocation = self._is_born(size, self._default)
                    self._alive[key] = allocation, weakref.ref(storage, partial(self._forget, key))
        if function is _FLASH_BACKWARD:
            self._dies(self._is_born(workspace_bytes(args), Category.TEMPORARY))
        return result

    def _communicates(self, operator: Any, args: tuple) -> None:
        for argument in args:
            if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                group = dist.ProcessGroup.unbox(argument)
                if group.size() > 1:
                    self.groups.add(group.group_name)
        if operator not in (_SEND, _RECEIVE):
            return
        (tensor,) = args[0]
        group = dist.ProcessGroup.unbox(args[1])
        peer = args[2]
        ends = [dist.get_rank(), dist.get_process_group_ranks(group)[peer]]
        messages = self.sent
        if operator is _RECEIVE:
            ends.reverse()
            messages = self.received
            self.label(tensor, Category.MESSAGES)
        dtype = str(tensor.dtype).removeprefix("torch.")
        moment = self._moments[-1].name
        source, destination = ends
        messages.append(
            MessageEnd(
                source=source,
                destination=destination,
                channel=group.group_desc,
                shape=tuple(tensor.shape),
                dtype=dtype,
                num_bytes=tensor.nbytes,
                moment=moment,
            )
        )

    def _forget(self, key: int, _: Any) -> None:
        self._dies(self._alive.pop(key)[0])

    def _is_born(self, size: int, category: Category | None) -> _Allocation:
        allocation = _Allocation(size, category, len(self._moments))
        self._moments[-1].changes.append(_Change(allocation, is_birth=True))
        return allocation

    def _dies(self, allocation: _Allocation) -> None:
        """Activations that are born and die within one moment are temporaries."""
        if allocation.category is Category.ACTIVATIONS and allocation.moment == len(self._moments):
            allocation.category = Category.TEMPORARY
        self._moments[-1].changes.append(_Change(allocation, is_birth=False))


def _carried_by_layers(chunks: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Keys, values and their gradients, and all else that layers carry from segment to segment."""
    contexts = {context for context in map(context_of, chunks) if context is not None}
    tensors: list[torch.Tensor] = []
    for context in contexts:
        for carried in context.all_carried():
            tensors += carried.tensors()
    return tensors


def workspace_bytes(args: Sequence[Any]) -> int:
    """Bytes that the backward of flash attention 2 allocates while it runs, beyond its results.

    It sums the gradient of the queries in fp32, at a head size that is a multiple of 32 (64 above 128), keeps one fp32
    number a query and head (`dq_accum` and `softmax_d` in mha_bwd of PyTorch's flash_api.cpp), and for grouped KV heads
    makes gradients of keys and values for every query head.
    """
    query = args[1]
    key = args[2]
    *sequences, length, heads, size = query.shape
    rows = _ROWS * math.ceil(length / _ROWS)
    step = 32 if size <= 128 else 64
    in_fp32 = 4 * math.prod(sequences) * heads * rows * (step * math.ceil(size / step) + 1)
    kv_heads = key.shape[-2]
    expanded = 2 * key.numel() // kv_heads * heads * key.element_size() if kv_heads != heads else 0
    return in_fp32 + expanded
