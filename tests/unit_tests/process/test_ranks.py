"""A plan that differs raises on all ranks and is named."""

import pytest
import torch.distributed as dist

from megatron.seq1f1b.process.ranks import check_agreement


@pytest.fixture
def ranks(monkeypatch):
    """Sets the plans of all ranks of a world."""

    def plans_are(*plans: str) -> None:
        monkeypatch.setattr(dist, "get_world_size", lambda: len(plans))
        monkeypatch.setattr(dist, "all_gather_object", lambda into, own: into.__setitem__(slice(None), plans))

    return plans_are


def test_equal_plans_pass(ranks):
    ranks("a", "a", "a")
    check_agreement("a")


def test_the_ranks_that_differ_from_most_are_named(ranks):
    ranks("a", "b", "a", "c")
    with pytest.raises(ValueError, match="rank 1 has b; rank 3 has c; the other ranks have a.*same flags"):
        check_agreement("a")
