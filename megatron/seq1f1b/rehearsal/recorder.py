"""The step that is rehearsed: its actions, the messages of both ends, and the kinds of what is kept."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ..model.kv_cache import Rows
from ..schedule import MOVE_KINDS, Action, Kind, Shape
from .ledger import Category, StorageCounter, at

_SEND, _RECEIVE = torch.ops.c10d.send.default, torch.ops.c10d.recv_.default


@dataclass(frozen=True)
class Message:
    """One message on a channel: a queue without tags from one global rank to another, in one process group."""

    source: int
    destination: int
    channel: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    moment: str

    @property
    def queue(self) -> tuple[int, int, str]:
        return self.source, self.destination, self.channel

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {at(self.moment)}"


@dataclass(frozen=True)
class Traffic:
    """The sends and the posted receives of one rank, each in its order."""

    sent: list[Message] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)


def mismatches(traffic: Iterable[Traffic]) -> list[str]:
    """One sentence, without its full stop, for each channel whose ends disagree; `traffic` has that of all ranks."""
    both: Mapping[tuple[int, int, str], Traffic] = defaultdict(Traffic)
    for one_rank in traffic:
        for message in one_rank.sent:
            both[message.queue].sent.append(message)
        for message in one_rank.received:
            both[message.queue].received.append(message)
    return [sentence for _, ends in sorted(both.items(), key=lambda item: item[0]) if (sentence := _mismatch(ends))]


def _mismatch(ends: Traffic) -> str | None:
    for number, (one, other) in enumerate(zip_longest(ends.sent, ends.received)):
        first = one or other
        between = f"from rank {first.source} to rank {first.destination} ({first.channel})"
        if one is None or other is None:
            return (
                f"{len(ends.sent)} messages are sent {between}, but {len(ends.received)} received; the first without "
                f"a partner is {first}"
            )
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"message {number} {between} is sent as {one}, but received as {other}"
    return None


class StepRecorder:
    """Takes the place of the tracer and the recorder of a real step; the interpreter reports every action to it.

    It needs no clock; the moments of the ledger take the place of time.
    """

    def __init__(self, counter: StorageCounter, progress: Callable[[float], None]) -> None:
        self.traffic = Traffic()
        self.stages: set[int] = set()
        self.groups: set[str] = set()  # process groups of several ranks that were used
        self._counter = counter
        self._progress = progress
        self._num_actions = self._num_actions_in_all = 0
        self._chunks: list[torch.nn.Module] = []
        self._stage: int | None = None
        self._with_logits: set[int] = set()  # stages
        counter.on_communication = self._communicates

    @contextmanager
    def step(self, _: str, shape: Shape, *__: Any, **___: Any) -> Iterator["StepRecorder"]:
        """As `Tracer.step`."""
        self._num_actions_in_all = 2 * shape.num_units * shape.num_chunks
        yield self

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """As `Recorder.span`: the body is `action`. Copies run in threads, and their moments are those around them."""
        if action.kind in MOVE_KINDS:
            yield
            return
        ends_with_logits = action.kind is not Kind.F and action.stage in self._with_logits
        # Until the gradient of the output layer's input is there, a backward makes gradients of logits.
        self._counter.ledger.begin(str(action), Category.LOGITS if ends_with_logits else Category.ACTIVATIONS)
        self._stage = action.stage
        self.stages.add(action.stage)
        yield
        self._counter.label(_kept_by_segments(self._chunks), Category.STATE)
        self._counter.ledger.begin(f"after {action}")
        self._num_actions += 1
        if self._num_actions % max(1, self._num_actions_in_all // 100) == 0:
            self._progress(min(1.0, self._num_actions / self._num_actions_in_all))

    def reading(self) -> None:
        """As `Recorder.reading`: a rehearsal has no times."""

    def watch(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Look for keys and values in the caches of these model chunks, and for logits in their output layers."""
        self._chunks = list(chunks)
        for chunk in self._chunks:
            for name, module in chunk.named_modules():
                if name.rpartition(".")[2] == "output_layer":
                    module.register_forward_pre_hook(self._logits_begin)

    def _communicates(self, operator: Any, args: tuple) -> None:
        """Record the process group of an operator of torch.distributed, and the message if it is one."""
        for argument in args:
            if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                group = dist.ProcessGroup.unbox(argument)
                if group.size() > 1:
                    self.groups.add(group.group_name)
        if operator not in (_SEND, _RECEIVE):
            return
        (tensor,), group, peer = args[0], dist.ProcessGroup.unbox(args[1]), args[2]
        here, there = dist.get_rank(), dist.get_process_group_ranks(group)[peer]
        is_sent = operator is _SEND
        message = Message(
            *((here, there) if is_sent else (there, here)),
            group.group_desc,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.numel() * tensor.element_size(),
            self._counter.ledger.moment,
        )
        if is_sent:
            self.traffic.sent.append(message)
        else:
            self.traffic.received.append(message)
            self._counter.label([tensor], Category.MESSAGES)

    def _logits_begin(self, _: Any, inputs: tuple) -> None:
        if self._stage is not None:
            self._with_logits.add(self._stage)
        self._counter.ledger.fill_with(Category.LOGITS)
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self._counter.ledger.fill_with(Category.ACTIVATIONS))


def _kept_by_segments(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Keys, values and their gradients, and whatever else layers keep of a micro-batch from segment to segment."""
    for context in {chunk.segment_context for chunk in chunks if hasattr(chunk, "segment_context")}:
        for cache in context.kept():
            yield from _tensors_in(cache if isinstance(cache, dict) else vars(cache))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | tuple | list | Rows):
        fields = vars(value) if isinstance(value, Rows) else value
        for item in fields.values() if isinstance(fields, dict) else fields:
            yield from _tensors_in(item)
