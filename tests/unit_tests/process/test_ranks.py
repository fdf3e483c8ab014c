"""A plan that differs raises on all ranks and is named; an error goes to other ranks in place of an object."""

import pickle
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.seq1f1b.process import ranks
from megatron.seq1f1b.process.ranks import Outcome, check_agreement


def test_the_ranks_that_differ_from_most_are_named(monkeypatch):
    def agree(*plans: str) -> None:
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(len(plans))))
        monkeypatch.setattr(ranks, "results_on_all_ranks", lambda *_: list(plans))
        check_agreement(lambda: plans[0], "a plan", SimpleNamespace())

    agree("a", "a", "a")
    with pytest.raises(ValueError, match="rank 1 has b; rank 3 has c; the other ranks have a.*same flags"):
        agree("a", "b", "a", "c")


def test_an_error_is_raised_where_it_was_made_and_sent():
    class Unknown(KeyError):
        """Cannot be pickled."""

    def make(error: Exception) -> None:
        raise error

    assert pickle.loads(pickle.dumps(Outcome(lambda: [1, 2]))).result() == [1, 2]
    for error, kind, words in (
        (ValueError("the data have no end"), ValueError, "^the data have no end$"),
        (Unknown("gone"), RuntimeError, r"(?s)^Traceback .*in make.*Unknown: 'gone'"),
    ):
        outcome = Outcome(lambda error=error: make(error))
        with pytest.raises(type(error)) as here:
            outcome.result()
        assert here.value is error
        with pytest.raises(kind, match=words):
            pickle.loads(pickle.dumps(outcome)).result()
