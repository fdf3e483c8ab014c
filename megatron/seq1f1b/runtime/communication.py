"""Messages between pipeline ranks.

A channel is one payload (activations or gradients) from one rank to another: a queue without tags. The schedule
fixes the order, the same at both ends, and when each receive is posted, so neither shapes nor tags are negotiated.
`schedule/lowering.py` shows why this cannot hang. A rank may use messages in another order than they come in.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..schedule import Action, Channel, Kind, Placement, channel_of
from .waits import Waits, report_if_late

_GLOO_TAGS = {Kind.F: 1, Kind.B: 2}

# Thread blocks of an NCCL kernel for messages, unless Megatron's configuration for `pp` has a number of its own. NCCL
# would take up to 32 over NVLink, an eighth of an H100.
MAX_CTAS = 4
_NCCL_UNDEFINED = -(2**31)


def channels_of(placement: Placement, rank: int) -> dict[tuple[Kind, int], Channel]:
    """By kind of message and stage on this rank, the channels to neighbouring stages that are on others."""
    channels = {}
    for stage in placement.stages_of(rank):
        for kind, neighbour in (
            (Kind.RECV_F, stage - 1),
            (Kind.SEND_B, stage - 1),
            (Kind.SEND_F, stage + 1),
            (Kind.RECV_B, stage + 1),
        ):
            if 0 <= neighbour < placement.num_stages and placement.rank_of(neighbour) != rank:
                channels[kind, stage] = channel_of(Action(kind, stage), placement)
    return channels


class Communicator:
    """Non-blocking messages between the ranks of one pipeline group.

    All ranks of the world must make it at the same time, since it makes process groups for NCCL: messages that share an
    NCCL group wait for each other. gloo keeps messages apart by tags and uses the pipeline group as it is.
    Nothing here waits longer than `timeout`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        channels: Iterable[Channel],
        dtype: torch.dtype,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        channels = sorted(set(channels))
        self._ranks = dist.get_process_group_ranks(group)
        self._group = group
        self._dtype = dtype
        self._device = device
        self._timeout = timeout
        self._is_gloo = dist.get_backend(group) == "gloo"
        # Messages are kernels that wait on a GPU; behind them no other kernel can be loaded.
        self.is_on_device = dist.get_backend(group) == "nccl"
        # gloo moves host memory only; through pinned buffers several ranks can share one GPU.
        self._is_staged = self._is_gloo and device.type == "cuda"
        self._groups = {} if self._is_gloo or not channels else groups_per_communicator(group, channels, timeout)
        # Only waiting shows that a gloo send has left; with NCCL, no host waits for a receive.
        self._waits = Waits("sends" if self._is_gloo else "receives")
        if not self._is_gloo:
            self._waits.submit(partial(torch.cuda.set_device, device))  # else the thread takes memory on the first GPU
        # By (stage, micro-batch, segment) of the action that a message is for; without work once it is there.
        self._receiving: dict[Channel, dict[tuple | None, tuple[dist.Work | None, Tensor, Action | None]]] = {}
        self._sending: deque[tuple[tuple[dist.Work, Tensor] | Future, Channel, Action | None]] = deque()
        self._goes_in_turn = False
        self._connect(channels)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Inside, every send and receive has ended when its call returns; for programs with messages in turn."""
        self._goes_in_turn = True
        try:
            yield
        finally:
            self._goes_in_turn = False

    def post_receive(self, channel: Channel, shape: tuple[int, ...], action: Action | None = None) -> None:
        """Post a buffer for the next message of a channel; `action` is the RECV that it belongs to."""
        device = "cpu" if self._is_staged else self._device
        buffer = torch.empty(shape, dtype=self._dtype, device=device, pin_memory=self._is_staged)
        work = dist.irecv(buffer, self._ranks[channel.source], **self._route(channel))
        if self._goes_in_turn:
            self._await(work, channel, action)
            work = None
        self._receiving.setdefault(channel, {})[None if action is None else action[1:]] = work, buffer, action

    def receive(self, channel: Channel, unit: tuple | None = None) -> Tensor:
        """Wait for the message of a channel that is for `unit`, the (stage, micro-batch, segment) of its RECV.

        Raises RuntimeError if it does not come.
        """
        work, buffer, action = self._receiving[channel].pop(unit)
        if work is not None:
            self._await(work, channel, action)
        return buffer.to(self._device, non_blocking=True) if self._is_staged else buffer

    def send(self, channel: Channel, tensor: Tensor, action: Action | None = None) -> None:
        """Send without waiting. The message holds the storage of `tensor` until it has left, the caller need not.

        Raises RuntimeError if an earlier one did not leave.
        """
        message = tensor.detach()
        if self._is_staged:
            message = torch.empty(message.shape, dtype=message.dtype, pin_memory=True).copy_(message)
        message = message.contiguous()
        work = dist.isend(message, self._ranks[channel.destination], **self._route(channel))
        left = self._waits.submit(partial(self._wait, work, message)) if self._is_gloo else (work, message)
        self._sending.append((left, channel, action))
        while self._sending and (self._goes_in_turn or _has_left(self._sending[0][0])):
            self._finish(*self._sending.popleft())

    def finish(self) -> None:
        """Wait until every message has left, and assert that every posted receive was used."""
        while self._sending:
            self._finish(*self._sending.popleft())
        unused = [channel for channel, posted in self._receiving.items() if posted]
        assert not unused, f"messages outlived the step: {unused}"

    def _route(self, channel: Channel) -> dict:
        if self._is_gloo:
            return {"group": self._group, "tag": _GLOO_TAGS[channel.payload]}
        return {"group": self._groups[channel.communicator]}

    def _finish(self, sending: tuple[dist.Work, Tensor] | Future, channel: Channel, action: Action | None) -> None:
        try:
            if isinstance(sending, Future):
                sending.result()
            else:
                self._wait(sending[0])
        except RuntimeError as error:
            raise RuntimeError(f"{_message(channel, action)} was not taken: {error}") from error
        self._settle()

    def _await(self, work: dist.Work, channel: Channel, action: Action | None) -> None:
        """Wait for a message to come."""
        start = time.monotonic()
        try:
            self._wait(work)
        except RuntimeError as error:
            seconds = time.monotonic() - start
            raise RuntimeError(f"{_message(channel, action)} did not come in {seconds:.0f} s: {error}") from error
        if not self._is_gloo:
            mark = torch.cuda.Event()
            mark.record()
            describe = partial(_message, channel, action)
            self._waits.submit(partial(report_if_late, mark, describe, time.monotonic(), self._timeout))
        self._settle()

    def _settle(self) -> None:
        """In turn, let the host wait, too."""
        if self._goes_in_turn and self.is_on_device:
            torch.cuda.current_stream(self._device).synchronize()

    def _wait(self, work: dist.Work, message: Tensor | None = None) -> None:
        """Wait for a send or receive; `message` is only held, so that its storage lives until then."""
        if self._is_gloo:
            work.wait(self._timeout)
        else:
            # Only the stream waits; with a timeout the host would, too. The group's own timeout guards it.
            work.wait()

    def _connect(self, channels: list[Channel]) -> None:
        """Send one number over every channel, all ranks in the same order.

        NCCL sets up a connection at its first message, and until the peer does the same the host is blocked. In the
        order of a schedule a rank could block at a receive, and not come to the forward that its peer waits for.
        """
        rank = self._ranks.index(dist.get_rank())
        for channel in channels:
            if rank == channel.destination:
                self.post_receive(channel, (1,))
                self.receive(channel)
            elif rank == channel.source:
                self.send(channel, torch.zeros(1, dtype=self._dtype, device=self._device))
                self.finish()


def _message(channel: Channel, action: Action | None) -> str:
    """A message in words, by the SEND or RECV that it belongs to."""
    ranks = f"pipeline rank {channel.source} to {channel.destination}"
    if action is None:
        return f"the first message from {ranks}"
    is_forward = channel.payload is Kind.F
    source = action.stage - (action.kind is Kind.RECV_F) + (action.kind is Kind.RECV_B)
    stages = f"stage {source} to {source + (1 if is_forward else -1)}"
    what = "activations" if is_forward else "gradient"
    unit = f"micro-batch {action.microbatch}, segment {action.segment}"
    return f"the {what} of {unit} from {stages} ({ranks}; {action})"


def groups_per_communicator(
    group: dist.ProcessGroup, channels: Iterable[Channel], timeout: timedelta
) -> dict[tuple, dist.ProcessGroup]:
    """A process group over the ranks of `group` for each communicator that the channels need.

    Making a group is a collective of the whole world, so every rank makes those of every pipeline. They keep what
    Megatron has set for NCCL in `group` (--nccl-communicator-config-path, --high-priority-stream-groups).
    """
    own = dist.get_process_group_ranks(group)
    pipelines: list[list[int]] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, own)
    groups = {}
    for communicator in sorted({channel.communicator for channel in channels}):
        for ranks in sorted(set(map(tuple, pipelines))):
            made = dist.new_group(
                ranks,
                timeout=timeout,
                backend=dist.get_backend(group),
                pg_options=_options(group),
                group_desc=_description(*communicator),
            )
            if list(ranks) == own:
                groups[communicator] = made
    return groups


def _description(payload: Kind, goes_up: bool, parity: int) -> str:
    """The messages of a communicator in words."""
    what = "activations" if payload is Kind.F else "gradients"
    return f"{what} from {'odd' if parity else 'even'} to {'higher' if goes_up else 'lower'} pipeline ranks"


def _options(group: dist.ProcessGroup) -> Any:
    """Options of a group for messages, after those of the pipeline group; None if its backend is not NCCL.

    A receive is posted a whole action ahead, and its kernel waits beside compute: it runs at high priority, so that it
    ends as soon as the message is there, and on few multiprocessors.
    """
    if dist.get_backend(group) != "nccl":
        return None
    own = group._get_backend(torch.device("cuda")).options.config
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MAX_CTAS
    for name in ("cga_cluster_size", "min_ctas", "max_ctas", "net_name"):
        value = getattr(own, name)
        if value not in (None, _NCCL_UNDEFINED):  # the setters crash where a name is None
            setattr(options.config, name, value)
    return options


def _has_left(sending: tuple[dist.Work, Tensor] | Future) -> bool:
    return sending.done() if isinstance(sending, Future) else sending[0].is_completed()
