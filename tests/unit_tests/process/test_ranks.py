"""A plan that differs raises on all ranks and is named; what a rank starts ends with it."""

from unittest.mock import Mock

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron.seq1f1b.process import ranks
from megatron.seq1f1b.process.ranks import check_agreement


def test_the_ranks_that_differ_from_most_are_named(monkeypatch):
    def agree(*plans: str) -> None:
        monkeypatch.setattr(dist, "get_world_size", lambda: len(plans))
        monkeypatch.setattr(dist, "all_gather_object", lambda into, own: into.__setitem__(slice(None), plans))
        check_agreement("a")

    agree("a", "a", "a")
    with pytest.raises(ValueError, match="rank 1 has b; rank 3 has c; the other ranks have a.*same flags"):
        agree("a", "b", "a", "c")


@pytest.mark.parametrize("given, mode", [((), "fork"), (("spawn",), "spawn")])
def test_the_process_that_writes_checkpoints_ends_with_its_rank(monkeypatch, given, mode):
    manager = Mock()
    monkeypatch.setattr(ranks, "SyncManager", manager)
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    assert ranks.results_queue("fork", None, *given) is manager.return_value.Queue.return_value
    assert manager.call_args.kwargs["ctx"].get_start_method() == mode
    manager.return_value.start.assert_called_once_with(ranks.end_with_parent)
