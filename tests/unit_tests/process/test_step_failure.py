import pytest
import torch.distributed as dist

from megatron.seq1f1b.process import step_failure

RANKS = (3, 4)
LOST = "[pair.cc:537] Read error [127.0.0.1]:412: Connection reset by peer. This is typically caused by ..."


@pytest.fixture
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(step_failure, "_PATIENCE", 0.1)
    return store


def test_a_rank_whose_peer_is_gone_has_its_words(store):
    mistake = ValueError("the loss is a string")
    assert step_failure.explained(mistake, "the first step", RANKS) is mistake
    lost = RuntimeError(LOST)
    lost.add_note("failed at 0F0.0")
    found = step_failure.explained(lost, "the first step", RANKS)
    assert str(found) == "rank 3 failed in this step: ValueError: the loss is a string"
    assert found.__notes__ == ["failed at 0F0.0"]


def test_words_of_another_step_say_nothing(store):
    step_failure.explained(ValueError("the loss is a string"), "the first step", RANKS)
    found = step_failure.explained(RuntimeError(LOST), "the second step", RANKS)
    assert str(found).startswith("the connection to another rank on 127.0.0.1 broke, so that rank has ended")


def test_the_notes_of_ranks_say_who_waits(store, monkeypatch):
    for rank, words in ((4, "rank 4 prepares a plan"), (5, "rank 5 prepares another"), (3, "rank 3 waits")):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        step_failure.leave_note(words)
    found = step_failure.explained(RuntimeError(LOST), "the first step", RANKS)
    assert str(found).endswith(", say why; rank 3 waits; rank 4 prepares a plan")
    step_failure.leave_note("")
    found = step_failure.explained(RuntimeError(LOST), "the first step", RANKS)
    assert str(found).endswith(", say why; rank 4 prepares a plan")
    step_failure.explained(ValueError("the loss is a string"), "the first step", RANKS)
    found = step_failure.explained(RuntimeError(LOST), "the first step", RANKS)
    assert str(found) == "rank 3 failed in this step: ValueError: the loss is a string"
