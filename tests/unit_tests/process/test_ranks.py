"""A plan that differs raises on all ranks and is named."""

import pytest
import torch.distributed as dist

from megatron.seq1f1b.process.ranks import check_agreement


def test_the_ranks_that_differ_from_most_are_named(monkeypatch):
    def agree(*plans: str) -> None:
        monkeypatch.setattr(dist, "get_world_size", lambda: len(plans))
        monkeypatch.setattr(dist, "all_gather_object", lambda into, own: into.__setitem__(slice(None), plans))
        check_agreement("a")

    agree("a", "a", "a")
    with pytest.raises(ValueError, match="rank 1 has b; rank 3 has c; the other ranks have a.*same flags"):
        agree("a", "b", "a", "c")
