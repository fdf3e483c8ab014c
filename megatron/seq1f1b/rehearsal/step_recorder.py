"""The step that is rehearsed: its actions, the messages of both ends, and the kinds of what is kept."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ..model.kv_cache import Rows
from ..schedule import MOVE_KINDS, Action, Kind, Shape
from .ledger import Category, Ledger
from .report import Message

_SEND, _RECEIVE = torch.ops.c10d.send.default, torch.ops.c10d.recv_.default


class StepRecorder(Ledger):
    """A ledger that takes the place of the tracer and of the recorder of a real step: the interpreter reports every
    action to it, and its moments take the place of time."""

    def __init__(self, run: Callable[[Any, tuple, dict], Any]) -> None:
        super().__init__(run)
        self.sent: list[Message] = []
        self.received: list[Message] = []  # in the order in which their receives are posted
        self.stages: set[int] = set()
        self.groups: set[str] = set()  # process groups of several ranks that were used
        self._chunks: list[torch.nn.Module] = []
        self._stage = 0
        self._with_logits: set[int] = set()  # stages

    @contextmanager
    def step(self, _: str, shape: Shape, chunks: Iterable[torch.nn.Module], *__: Any) -> Iterator["StepRecorder"]:
        """As `Tracer.step`; the caches of `chunks` have keys and values, their output layers logits."""
        self._chunks = list(chunks)
        for chunk in self._chunks:
            for name, module in chunk.named_modules():
                if name.rpartition(".")[2] == "output_layer":
                    module.register_forward_pre_hook(self._logits_begin)
        yield self

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """As `Recorder.span`: the body is `action`. Copies run in threads, and their moments are those around them."""
        if action.kind in MOVE_KINDS:
            yield
            return
        ends_with_logits = action.kind is not Kind.F and action.stage in self._with_logits
        # Until the gradient of the output layer's input is there, a backward makes gradients of logits.
        self.begin(str(action), Category.LOGITS if ends_with_logits else Category.ACTIVATIONS)
        self._stage = action.stage
        self.stages.add(action.stage)
        yield
        self.label(_kept_by_segments(self._chunks), Category.STATE)
        self.begin(f"after {action}")

    def communicates(self, operator: Any, args: tuple) -> None:
        """Record the process group, and the message if it is one."""
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
            self.moment,
        )
        (self.sent if is_sent else self.received).append(message)
        if not is_sent:
            self.label(tensor, Category.MESSAGES)

    def _logits_begin(self, _: Any, inputs: tuple) -> None:
        self._with_logits.add(self._stage)
        self.fill_with(Category.LOGITS)
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self.fill_with(Category.ACTIVATIONS))


def _kept_by_segments(chunks: Iterable[torch.nn.Module]) -> list[Any]:
    """Keys, values and their gradients, and whatever else layers keep of a micro-batch from segment to segment."""
    contexts = {chunk.segment_context for chunk in chunks if hasattr(chunk, "segment_context")}
    caches = [cache if isinstance(cache, dict) else vars(cache) for context in contexts for cache in context.kept()]
    return [vars(leaf) if isinstance(leaf, Rows) else leaf for leaf in tree_leaves(caches)]
