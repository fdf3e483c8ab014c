"""Messages between two ranks, here threads of one process with groups that only record; and the names of those that a
GPU waits for in vain, which here passes a mark when the test sets it."""

import re
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megatron.seq1f1b.runtime import communication, message_groups
from megatron.seq1f1b.runtime.communication import Communicator
from megatron.seq1f1b.runtime.message_groups import MAX_CTAS, groups_per_communicator
from megatron.seq1f1b.schedule import Channel, Kind, Placement, parse_action

FORWARD, BACKWARD = Channel(Kind.F, 0, 1), Channel(Kind.B, 1, 0)
TIMEOUT = timedelta(seconds=7)


class Work:
    """A transfer with a given end."""

    def __init__(self, error: str | None = None) -> None:
        self.error, self.timeout = error, None

    def wait(self, timeout=None) -> None:
        self.timeout = timeout
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def wires(alone, monkeypatch):
    """The sends and receives of a communicator of rank 0 of two, which are given the works in `wires.works`."""
    wires = SimpleNamespace(sent=[], received=[], works=[])

    def transfer(log):
        def start(tensor, rank, group):
            log.append((tensor, rank, group))
            return wires.works.pop(0) if wires.works else Work()

        return start

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 4])
    monkeypatch.setattr(dist, "isend", transfer(wires.sent))
    monkeypatch.setattr(dist, "irecv", transfer(wires.received))
    groups = {FORWARD.communicator: "of activations", BACKWARD.communicator: "of gradients"}
    monkeypatch.setattr(communication, "groups_per_communicator", lambda *_: groups)
    wires.communicator = Communicator(dist.group.WORLD, Placement(2), torch.float32, torch.device("cpu"), TIMEOUT)
    wires.sent.clear(), wires.received.clear()
    return wires


def test_messages_go_to_global_ranks_and_none_is_left(wires):
    wires.communicator.send(FORWARD, torch.ones(2), (2,))
    wires.communicator.post_receive(BACKWARD, (3,))
    assert wires.communicator.receive().shape == (3,)
    wires.communicator.finish()
    ((sent, *to),), ((received, *origin),) = wires.sent, wires.received
    assert torch.equal(sent, torch.ones(2)) and received.shape == (3,)
    assert to == [4, "of activations"] and origin == [4, "of gradients"]
    wires.communicator.post_receive(BACKWARD, (3,))
    with pytest.raises(AssertionError, match="messages outlived the step"):
        wires.communicator.finish()


@pytest.mark.parametrize(
    "tensor, given",
    [
        (torch.ones(4, 3, 8), "torch.float32 [4, 3, 8]"),
        (torch.ones(4, 2, 8, dtype=torch.bfloat16), "torch.bfloat16 [4, 2, 8]"),
        ((torch.ones(4, 2, 8),), "tuple"),
        (None, "NoneType"),
    ],
    ids=("larger", "of another type", "several", "none"),
)
def test_a_message_that_its_receiver_does_not_expect_is_not_sent(wires, tensor, given):
    sentence = (
        f"0SEND_F3.2 (pipeline rank 0 to 1): the output of a stage is {given}, but the next rank expects torch.float32 "
        "[4, 2, 8]; batches must have"
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        wires.communicator.send(FORWARD, tensor, (4, 2, 8), parse_action("0SEND_F3.2"))
    assert not wires.sent


STUCK = {
    "2RECV_B5.1": "2RECV_B5.1 (pipeline rank 1 to 0) did not come",
    "0SEND_F3.2": "0SEND_F3.2 (pipeline rank 0 to 1) was not taken",
}


@pytest.mark.parametrize("text", STUCK)
def test_a_message_that_gets_stuck_is_named(wires, text):
    """Nobody waits for longer than the timeout."""
    work, action = Work("Timed out waiting 7000ms"), parse_action(text)
    wires.works = [work]
    with pytest.raises(RuntimeError, match=re.escape(f"{STUCK[text]}: Timed out waiting 7000ms")):
        if action.kind is Kind.RECV_B:
            wires.communicator.post_receive(BACKWARD, (1,), action)
            wires.communicator.receive(action)
        else:
            wires.communicator.send(FORWARD, torch.ones(1), (1,), action)
            wires.communicator.finish()
    assert work.timeout == TIMEOUT


def test_nobody_waits_for_a_thread_that_ended_without_a_word(wires, monkeypatch):
    """Here the thread of sends: it has lacked the memory to say that a message has left."""
    monkeypatch.setattr(wires.communicator, "_wait_in_thread", lambda wait: Future())
    monkeypatch.setattr(wires.communicator, "_timeout", timedelta(0))
    monkeypatch.setattr(communication, "_LATENESS", 0.1)
    wires.communicator.send(FORWARD, torch.ones(1), (1,), parse_action("0SEND_F3.2"))
    words = "0SEND_F3.2 (pipeline rank 0 to 1) was not taken: the thread that waits for messages has ended"
    with pytest.raises(RuntimeError, match=re.escape(words)):
        wires.communicator.finish()


def test_nccl_groups_carry_one_kind_of_message(alone, monkeypatch):
    made = []
    monkeypatch.setattr(message_groups, "_options", lambda group: "options")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(dist, "new_group", lambda ranks, **given: made.append(given) or "made")
    monkeypatch.setattr(dist, "all_gather_object", lambda into, own: into.__setitem__(0, own))
    groups = groups_per_communicator(dist.group.WORLD, [FORWARD, BACKWARD], TIMEOUT)
    assert groups == {FORWARD.communicator: "made", BACKWARD.communicator: "made"}
    assert [(given["group_desc"], given["pg_options"], given["timeout"]) for given in made] == [
        ("gradients from odd to lower pipeline ranks", "options", TIMEOUT),
        ("activations from even to higher pipeline ranks", "options", TIMEOUT),
    ]


def test_nccl_options_take_what_megatron_sets_and_no_more(monkeypatch):
    if not hasattr(dist, "ProcessGroupNCCL"):
        pytest.skip("PyTorch has no NCCL")
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")

    def made_from(own):
        made = message_groups._options(SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=own)))
        assert made.is_high_priority_stream
        return made.config.max_ctas, made.config.min_ctas, made.config.net_name

    own = dist.ProcessGroupNCCL.Options()
    assert made_from(own) == (MAX_CTAS, own.config.min_ctas, own.config.net_name)
    own.config.max_ctas, own.config.min_ctas, own.config.net_name = 16, 2, "IB"
    assert made_from(own) == (16, 2, "IB")


def test_in_turn_the_host_waits_for_every_message(wires, monkeypatch):
    """On a GPU for the stream, too; a message that has come is not waited for again."""
    stream, action = Mock(), parse_action("0RECV_B0.0")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    wires.works = received, sent = [Work(), Work()]
    wires.communicator._messages_are_kernels = True
    wires.communicator.begin_step(loads_kernels=True)
    wires.communicator.post_receive(BACKWARD, (1,), action)
    assert received.timeout == TIMEOUT and stream.synchronize.call_count == 1
    wires.communicator.send(FORWARD, torch.ones(1), (1,))
    assert sent.timeout == TIMEOUT and stream.synchronize.call_count == 2
    received.error = "waited for twice"
    wires.communicator.receive(action)
    wires.communicator.finish()


def test_on_nccl_a_late_message_names_its_stage_and_action(alone, monkeypatch, caplog):
    """Here the GPU waits for ever. Its thread must choose the device of the rank: CUDA would give it the first GPU, and
    take half a gigabyte there."""

    def wait_for(condition) -> None:
        end = time.monotonic() + 60
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)

    device, chosen = torch.device("cpu"), []
    event = SimpleNamespace(record=lambda: None, query=lambda: False)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: Work())
    monkeypatch.setattr(communication, "groups_per_communicator", lambda *_: {BACKWARD.communicator: None})
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda given: chosen.append((threading.get_ident(), given)))
    monkeypatch.setattr(Communicator, "_connect", lambda *_: None)
    communicator = Communicator(dist.group.WORLD, Placement(2), torch.float32, device, timedelta(seconds=3))
    wait_for(lambda: chosen)
    ((thread, chosen_device),) = chosen
    assert chosen_device == device and thread != threading.get_ident()
    for action in (parse_action(f"2RECV_B5.{segment}") for segment in (1, 0)):
        communicator.post_receive(BACKWARD, (1,), action)
        communicator.receive(action)
    assert not caplog.messages
    wait_for(lambda: caplog.messages)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("2RECV_B5.1 (pipeline rank 1 to 0) has not come")
