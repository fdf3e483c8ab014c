"""Messages between pipeline ranks.

A channel carries activations or gradients from one rank to another, in the order of the schedule, equal at both ends,
so nothing is negotiated; `schedule/lowering.py` shows why this cannot hang. A rank may use messages in another order.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..process.threads import one_after_another
from ..schedule import Action, Channel, Kind, Placement, channels_of
from .message_groups import groups_per_communicator

_log = logging.getLogger(__name__)

_PATIENCE = 0.8  # share of the timeout; after the whole timeout NCCL ends the process
_LOOKS = 20  # checks in that time
_LATENESS = 10.0  # seconds that a thread may be behind the end of a wait


class Message(NamedTuple):
    """A message on its way, and its SEND or RECV; the first message of a channel has none. `wait()` returns when it has
    left or arrived, `is_over()` says whether it has."""

    channel: Channel
    action: Action | None
    tensor: Tensor
    wait: Callable[[], Any]
    is_over: Callable[[], bool]


class Communicator:
    """Non-blocking messages between the ranks of one pipeline group; all ranks of the world create it together.

    Messages that share an NCCL group would wait for each other, so there are several. gloo announces a receive on the
    connection of its group, where the announcement would wait behind messages that go the other way. No wait is longer
    than `timeout`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        placement: Placement,
        dtype: torch.dtype,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        channels_of_all: set[Channel] = set()
        for rank in range(placement.num_ranks):
            channels_of_all.update(channels_of(placement, rank).values())
        channels = sorted(channels_of_all)
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = self._ranks.index(dist.get_rank())
        self._dtype = dtype
        self._device = device
        self._timeout = timeout
        self._is_gloo = dist.get_backend(group) == "gloo"
        # Those of NCCL: they wait on the GPU, and no other kernel can be loaded while they wait.
        self._messages_are_kernels = dist.get_backend(group) == "nccl"
        # gloo moves host memory only. Pinned buffers let several ranks share one GPU.
        self._is_staged = self._is_gloo and device.type == "cuda"
        self._groups = groups_per_communicator(group, channels, timeout) if channels else {}
        # A gloo send is complete only after a wait for it; with NCCL, the thread watches for late receives.
        self._wait_in_thread = one_after_another()
        if not self._is_gloo:
            # Else the thread would take memory on the first GPU.
            self._wait_in_thread(partial(torch.cuda.set_device, device))
        self._receiving: dict[tuple | None, Message] = {}  # by action
        self._sending: deque[Message] = deque()  # keeps their storages until they have left
        self._goes_in_turn = False
        self._connect(channels)

    def begin_step(self, loads_kernels: bool) -> None:
        """Begin a step, in which messages go in turn if it `loads_kernels` and messages are kernels themselves."""
        self._goes_in_turn = loads_kernels and self._messages_are_kernels

    @property
    def goes_in_turn(self) -> bool:
        """Whether every send and receive of the step ends before its call returns; schedules are made for that."""
        return self._goes_in_turn

    def post_receive(self, channel: Channel, shape: tuple[int, ...], action: Action | None = None) -> None:
        """Post a buffer for the next message of a channel, that of the RECV `action`."""
        device = "cpu" if self._is_staged else self._device
        buffer = torch.empty(shape, dtype=self._dtype, device=device, pin_memory=self._is_staged)
        work: Any = dist.irecv(buffer, self._ranks[channel.source], group=self._groups[channel.communicator])
        message = Message(
            channel=channel,
            action=action,
            tensor=buffer,
            wait=self._wait_for(work),
            is_over=work.is_completed,
        )
        self._receiving[action] = message
        if self._goes_in_turn:
            self._finish(message)

    def receive(self, action: tuple | None = None) -> Tensor:
        """Wait for the message of a RECV. Raises RuntimeError if it does not arrive."""
        message = self._receiving.pop(action)
        if not self._goes_in_turn:
            self._finish(message)
        if self._is_staged:
            return message.tensor.to(self._device, non_blocking=True)
        return message.tensor

    def send(self, channel: Channel, tensor: Tensor, shape: tuple[int, ...], action: Action | None = None) -> None:
        """Send without waiting. Raises ValueError for another tensor than the receiver has a buffer of `shape` for, and
        RuntimeError if an earlier message did not leave."""
        self._require_expected(channel, tensor, shape, action)
        tensor = tensor.detach()
        if self._is_staged:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        tensor = tensor.contiguous()
        work: Any = dist.isend(tensor, self._ranks[channel.destination], group=self._groups[channel.communicator])
        wait = self._wait_for(work)
        is_over = work.is_completed
        if self._is_gloo:
            waiting = self._wait_in_thread(wait)
            wait = partial(self._result, waiting)
            is_over = waiting.done
        self._sending.append(
            Message(
                channel=channel,
                action=action,
                tensor=tensor,
                wait=wait,
                is_over=is_over,
            )
        )
        while self._sending and (self._goes_in_turn or self._sending[0].is_over()):
            self._finish(self._sending.popleft())

    def finish(self) -> None:
        """Wait until every message has left, and assert that every posted receive was used."""
        while self._sending:
            self._finish(self._sending.popleft())
        assert not self._receiving, f"messages outlived the step: {list(self._receiving)}"

    def _require_expected(self, channel: Channel, tensor: Any, shape: tuple[int, ...], action: Action | None) -> None:
        """No transport compares the ends of a message: gloo would deliver garbage, and NCCL would wait for ever."""
        if isinstance(tensor, Tensor) and tensor.shape == shape and tensor.dtype == self._dtype:
            return
        what = "output" if channel.payload is Kind.F else "gradient of the input"
        given = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(
            f"{described(channel, action)}: the {what} of a stage is {given}, but the next rank expects {self._dtype} "
            f"{list(shape)}; batches must have the sizes that the step is called with (--micro-batch-size, "
            "--seq-length), and the forward step must return the model's output, in the type pipeline_dtype of its "
            "configuration"
        )

    def _wait_for(self, work: dist.Work) -> Callable[[], Any]:
        # With NCCL the stream waits; with a timeout the host would wait, too.
        return partial(work.wait, self._timeout) if self._is_gloo else work.wait

    def _result(self, waiting: Future) -> Any:
        """The result of a wait in the thread, whose earlier waits are over. Raises RuntimeError if there is none long
        after it should have ended: without memory a thread ends without a word."""
        try:
            return waiting.result(self._timeout.total_seconds() + _LATENESS)
        except TimeoutError:
            raise RuntimeError("the thread that waits for messages has ended; its host may have no memory") from None

    def _finish(self, message: Message) -> None:
        """Wait until a message has left or arrived."""
        is_sent = message.channel.source == self._rank
        describe = partial(described, message.channel, message.action)
        try:
            message.wait()
        except RuntimeError as error:
            failure = "was not taken" if is_sent else "did not come"
            raise RuntimeError(f"{describe()} {failure}: {error}") from error
        if not (is_sent or self._is_gloo):  # the stream waits, and the thread watches it
            mark = torch.cuda.Event()
            mark.record()
            self._wait_in_thread(partial(report_if_late, mark, describe, time.monotonic(), self._timeout))
        if self._goes_in_turn:  # so far only the stream waits, as messages are kernels
            torch.cuda.current_stream(self._device).synchronize()

    def _connect(self, channels: list[Channel]) -> None:
        """Send one number over every channel, all ranks in the same order.

        NCCL connects at the first message and blocks the host until the peer does, too. In the order of a schedule a
        rank could block at a receive before the forward that its peer waits for.
        """
        for channel in channels:
            if self._rank == channel.destination:
                self.post_receive(channel, (1,))
                self.receive()
            elif self._rank == channel.source:
                self.send(channel, torch.zeros(1, dtype=self._dtype, device=self._device), (1,))
                self.finish()


def described(channel: Channel, action: Action | None) -> str:
    """The SEND or RECV of a message, and its ranks."""
    return f"{action or 'the first message'} (pipeline rank {channel.source} to {channel.destination})"


def report_if_late(mark: torch.cuda.Event, describe: Callable[[], str], since: float, timeout: timedelta) -> None:
    """Wait until the GPU passes the recorded `mark`; if that takes most of `timeout` from `since`, a time of
    `time.monotonic`, log once which message is late; NCCL reports only its number."""
    patience = _PATIENCE * timeout.total_seconds()
    interval = patience / _LOOKS
    while not mark.query():
        waited = time.monotonic() - since
        if waited >= patience:
            advice = "look at its sender, or give a longer --distributed-timeout-minutes than"
            _log.error("%s has not come for %.0f s; %s %g", describe(), waited, advice, timeout.total_seconds() / 60)
            patience = math.inf
        time.sleep(interval)
