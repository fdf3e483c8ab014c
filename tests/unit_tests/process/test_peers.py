"""How long a rank waits for its peers: when it joins them, and when it leaves them."""

import _thread
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from unittest.mock import Mock

import pytest

from megatron.seq1f1b.process import farewell, peers
from megatron.seq1f1b.process.peers import Peers


class Store:
    """That of a job of two ranks, of which the other one gives so many signs of life."""

    def __init__(self, signs: int = 0) -> None:
        self.signs = signs
        self.goes_on = threading.Event()

    def add(self, name: str, number: int) -> int:
        if name == "done":
            return int(self.signs == 1)  # with its last sign
        self.signs = max(self.signs - 1, 1) if self.signs else 0
        return self.signs

    def set(self, name: str, value: str) -> None:
        pass

    def check(self, names: list[str]) -> bool:
        return False

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        self.goes_on.wait()
        return b"another"


@pytest.fixture
def peers_of(monkeypatch):
    """The peers of rank 0 of two, with a store; what is waited for ends with it or never."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("TORCHELASTIC_USE_AGENT_STORE", "True")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(farewell, "SILENCE", 0.3)

    def made(store: Store) -> Peers:
        monkeypatch.setattr(peers, "joined_store", lambda: store)
        return Peers(lambda failure: None)

    return made


@pytest.mark.parametrize("signs", [0, 20])
def test_rank_0_waits_for_a_rank_while_it_lives(peers_of, monkeypatch, signs):
    """Here for ever, were it not killed, or done after a while in which it is silent less than so long at a time."""
    monkeypatch.setattr(farewell, "PATIENCE", 10_000)
    store = Store(signs)
    peers_of(store).leave()
    assert store.signs == min(signs, 1)


def test_a_rank_that_can_start_no_thread_reports_its_failure(peers_of, monkeypatch):
    store = Store()
    store.goes_on.set()
    peers = peers_of(store)
    monkeypatch.setattr(_thread, "start_new_thread", Mock(side_effect=RuntimeError("can't start new thread")))
    assert peers.report("mine") == "another"
    peers.leave()


def test_the_watching_thread_survives_a_lack_of_memory(peers_of, monkeypatch):
    store = Store()
    store.goes_on.set()
    has_failed = threading.Event()

    def check(names: list[str]) -> bool:
        has_failed.set()
        raise MemoryError

    monkeypatch.setattr(store, "check", check)
    peers = peers_of(store)
    assert has_failed.wait(60)
    assert peers.report("mine") == "another"
    peers.leave()


def test_a_store_whose_process_is_stopped_is_not_waited_for(peers_of, monkeypatch):
    monkeypatch.setattr(peers, "_PATIENCE", 0.3)
    store = Store()
    of_a_stopped_store = peers_of(store)
    assert of_a_stopped_store.report("mine") == "mine"
    assert of_a_stopped_store.leave(wait=True) is False
    store.goes_on.set()


@pytest.fixture
def joining(monkeypatch):
    """Rank 1 of two, which starts to join them by a function that returns their store."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(peers, "MUTE", 0.3)

    def start(join, port: int) -> Peers:
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setattr(peers, "joined_store", join)
        return Peers(lambda failure: None)

    return start


def test_a_program_that_holds_the_port_and_is_mute_is_named(joining):
    end = threading.Event()

    def unanswered() -> None:
        end.wait()
        raise RuntimeError("the end of the test")

    with socket.create_server(("localhost", 0)) as mute:
        port = mute.getsockname()[1]
        waiting = joining(unanswered, port)
        with pytest.raises(ValueError, match=rf"MASTER_ADDR=localhost, MASTER_PORT={port} accepts connections, but "):
            waiting.share("flags", timedelta(minutes=5))
    assert waiting.report("mine") == "mine", "to nobody"
    end.set()


def test_a_program_that_closes_connections_at_once_is_named(joining):
    def refused() -> None:
        raise RuntimeError("connection reset by peer")

    def close_all(server: socket.socket) -> None:
        with suppress(OSError):  # at the end of the test
            while True:
                server.accept()[0].close()

    with socket.create_server(("localhost", 0)) as closing:
        threading.Thread(target=close_all, args=[closing], daemon=True).start()
        port = closing.getsockname()[1]
        waiting = joining(refused, port)
        with pytest.raises(ValueError, match=rf"MASTER_ADDR=localhost, MASTER_PORT={port} accepts connections, but "):
            waiting.share("flags", timedelta(minutes=5))
        closing.shutdown(socket.SHUT_RDWR)


def test_a_rank_0_that_does_not_start_is_not_waited_for(joining):
    with socket.create_server(("localhost", 0)) as unused:
        port = unused.getsockname()[1]

    def refused() -> None:
        raise RuntimeError("connection refused")

    waiting = joining(refused, port)
    with pytest.raises(ValueError, match=f"rank 0 was not reached at MASTER_ADDR=localhost, MASTER_PORT={port} within"):
        waiting.share("flags", timedelta(seconds=0.6))


class TakenStore(Store):
    """That of a job whose rank 1 is another process."""

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        return b"another host:1"


def test_a_rank_does_not_join_another_job(joining):
    """It would end that job by its own failure."""
    of_another_job = joining(TakenStore, 1)
    with pytest.raises(ValueError, match="has a rank 1 already; two processes have RANK=1, or another job"):
        of_another_job.share("flags", timedelta(minutes=5))
    assert of_another_job.report("mine") == "mine"
