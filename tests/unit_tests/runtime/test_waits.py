"""A message that a GPU waits for in vain is named; the GPUs here pass a mark when the test sets it."""

import gc
import re
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron.seq1f1b.runtime import communication
from megatron.seq1f1b.runtime.communication import Communicator
from megatron.seq1f1b.runtime.waits import Waits, report_if_late
from megatron.seq1f1b.schedule import Channel, Kind, parse_action

BACKWARD = Channel(Kind.B, 1, 0)
SECOND = timedelta(seconds=1)


class Mark:
    def __init__(self, is_passed: bool = False) -> None:
        self.is_passed = is_passed

    def query(self) -> bool:
        return self.is_passed


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def test_the_first_message_that_does_not_come_is_named_once(caplog):
    waits, late = Waits("receives"), Mark()
    for mark, name in ((Mark(is_passed=True), "first"), (late, "second"), (Mark(), "third")):
        describe = partial("the {} message".format, name)
        waits.submit(partial(report_if_late, mark, describe, time.monotonic(), SECOND))
    wait_for(lambda: caplog.messages)
    assert len(caplog.messages) == 1
    assert re.match(r"the second message has not come for \d+ s; look", caplog.messages[0])
    late.is_passed = True
    wait_for(lambda: len(caplog.messages) > 1)
    assert [text.split(" has")[0] for text in caplog.messages] == ["the second message", "the third message"]


def test_the_thread_ends_with_its_owner():
    before = set(threading.enumerate())  # those of earlier tests may be about to end
    waits = Waits("sends")
    (thread,) = set(threading.enumerate()) - before
    assert thread.is_alive() and thread.daemon
    del waits
    gc.collect()
    wait_for(lambda: not thread.is_alive())
    assert not thread.is_alive()


@pytest.fixture
def nccl(alone, monkeypatch):
    """A communicator of rank 0 of two on NCCL, whose GPU waits for ever."""

    class Work:
        def wait(self) -> None:
            """Only the stream of the GPU does."""

    class Event(Mark):
        def record(self) -> None:
            """In the stream that waits."""

    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: Work())
    monkeypatch.setattr(communication, "groups_per_communicator", lambda *_: {BACKWARD.communicator: None})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: make.chosen.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr(Communicator, "_connect", lambda *_: None)
    make = partial(Communicator, dist.group.WORLD, [BACKWARD], torch.float32, torch.device("cpu"), 3 * SECOND)
    make.chosen = []
    return make


def test_on_nccl_a_late_message_names_its_stage_and_action(nccl, caplog):
    """Without a device of its own CUDA would give the thread the first GPU, and take half a gigabyte there."""
    communicator = nccl()
    wait_for(lambda: nccl.chosen)
    assert nccl.chosen == [("receives", communicator._device)]
    communicator.post_receive(BACKWARD, (1,), parse_action("2RECV_B5.1"))
    communicator.receive(BACKWARD, (2, 5, 1))
    assert not caplog.messages
    wait_for(lambda: caplog.messages)
    named = "the gradient of micro-batch 5, segment 1 from stage 3 to 2 (pipeline rank 1 to 0; 2RECV_B5.1) has not come"
    assert caplog.messages[0].startswith(named)
