"""The step that is rehearsed: its actions, the messages of both ends, and the kinds of what is kept."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..model.kv_cache import GradientSums
from ..model.latents import Prefix
from ..schedule import Action, Kind, Shape
from .ledger import Category, StorageCounter, at

_SEND = torch.ops.c10d.send.default


class Message(NamedTuple):
    """One message on a channel: a queue without tags from one global rank to another, in one process group."""

    source: int
    destination: int
    channel: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    moment: str

    @property
    def form(self) -> tuple[tuple[int, ...], str]:
        """What both ends must agree on."""
        return self.shape, self.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {at(self.moment)}"


class Traffic(NamedTuple):
    """The sends and the posted receives of one rank, each in its order."""

    sent: list[Message]
    received: list[Message]


def mismatches(traffic: Mapping[int, Traffic]) -> list[str]:
    """One sentence, without its full stop, for each channel whose ends disagree; `traffic` by global rank."""
    sent, received = defaultdict(list), defaultdict(list)
    for one_rank in traffic.values():
        for message in one_rank.sent:
            sent[message[:3]].append(message)
        for message in one_rank.received:
            received[message[:3]].append(message)
    found = (_mismatch(channel, sent[channel], received[channel]) for channel in sorted({*sent, *received}))
    return [sentence for sentence in found if sentence is not None]


def _mismatch(channel: tuple[int, int, str], sent: Sequence[Message], received: Sequence[Message]) -> str | None:
    source, destination, name = channel
    between = f"from rank {source} to rank {destination} ({name})"
    for number, (one, other) in enumerate(zip(sent, received, strict=False)):
        if one.form != other.form:
            return f"message {number} {between} is sent as {one}, but received as {other}"
    if len(sent) != len(received):
        more, index = (sent, len(received)) if len(sent) > len(received) else (received, len(sent))
        return (
            f"{len(sent)} messages are sent {between}, but {len(received)} received; the first without a partner is "
            f"{more[index]}"
        )
    return None


class StepRecorder:
    """Takes the place of the tracer and the recorder of a real step; the interpreter reports every action to it.

    It needs no clock; the moments of the ledger take the place of time.
    """

    def __init__(self, counter: StorageCounter, progress: Callable[[float], None]) -> None:
        self.traffic = Traffic([], [])
        self.num_actions = self._num_actions_in_all = 0
        self._counter = counter
        self._progress = progress
        self._chunks: list[torch.nn.Module] = []
        self._moment = "step begins"
        self._action: Action | None = None
        self.stages: set[int] = set()
        self._with_logits: set[int] = set()  # stages

    @contextmanager
    def step(self, _: str, shape: Shape, *__: Any, **___: Any) -> Iterator["StepRecorder"]:
        """As `Tracer.step`."""
        self._num_actions_in_all = 2 * shape.num_units * shape.num_chunks
        yield self

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """As `Recorder.span`: the body is `action`."""
        self._begin(str(action))
        if action.kind is not Kind.F and action.stage in self._with_logits:
            self._counter.ledger.default = Category.LOGITS  # until the gradient of the output layer's input is there
        self._action = action
        self.stages.add(action.stage)
        yield
        self._counter.label(_kept_by_segments(self._chunks), Category.STATE)
        self._begin(f"after {action}")
        self.num_actions += 1
        if self.num_actions % max(1, self._num_actions_in_all // 100) == 0:
            self._progress(min(1.0, self.num_actions / self._num_actions_in_all))

    def collective(self, kind: str, stage: int) -> Callable[[Any], None]:
        """As `Recorder.collective`: nothing runs beside the actions of a rehearsal."""
        return lambda handle: None

    def watch(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Look for keys and values in the caches of these model chunks, and for logits in their output layers."""
        self._chunks = list(chunks)
        for chunk in self._chunks:
            for name, module in chunk.named_modules():
                if name.rpartition(".")[2] == "output_layer":
                    module.register_forward_pre_hook(self._logits_begin)

    def message(self, operator: Any, args: tuple) -> None:
        """Record a send or a posted receive: the `c10d` operator and its arguments."""
        tensors, group, peer = args[0], dist.ProcessGroup.unbox(args[1]), args[2]
        is_sent = operator is _SEND
        ranks = dist.get_process_group_ranks(group)
        ends = (dist.get_rank(), ranks[peer]) if is_sent else (ranks[peer], dist.get_rank())
        (tensor,) = tensors
        one = Message(
            *ends,
            group.group_desc,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.numel() * tensor.element_size(),
            self._moment,
        )
        (self.traffic.sent if is_sent else self.traffic.received).append(one)
        if not is_sent:
            self._counter.label([tensor], Category.MESSAGES)

    def _begin(self, moment: str) -> None:
        self._moment = moment
        self._counter.ledger.begin(moment)
        self._counter.ledger.default = Category.ACTIVATIONS

    def _logits_begin(self, _: Any, inputs: tuple) -> None:
        if self._action is not None:
            self._with_logits.add(self._action.stage)
        self._counter.ledger.default = Category.LOGITS
        if inputs[0].requires_grad:
            inputs[0].register_hook(self._logits_end)

    def _logits_end(self, _: torch.Tensor) -> None:
        self._counter.ledger.default = Category.ACTIVATIONS


def _kept_by_segments(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Keys, values and their gradients, and whatever else layers keep of a micro-batch from segment to segment."""
    for context in {chunk.segment_context for chunk in chunks if hasattr(chunk, "segment_context")}:
        for cache in context.kept():
            yield from _tensors_in(vars(cache))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Prefix | GradientSums):
        yield from _tensors_in(vars(value))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
