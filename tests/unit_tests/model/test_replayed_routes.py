"""What a router finds in its RouterReplay while a segment runs, and afterwards; launches on two ranks compare routes,
losses and gradients in functional_tests/test_replayed_routes.py."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from megatron.seq1f1b.model import Segment, SegmentContext
from megatron.seq1f1b.model.layers.replayed_routes import Routes, _routing

SEGMENT = Segment(microbatch=0, index=1, start=4, end=8, sequence_length=8)
ROWS = torch.arange(8)[:, None]


class Router:
    """Of a layer whose program has gone on to another micro-batch, which is not replayed."""

    def __init__(self, routes: Routes) -> None:
        self.router_replay = SimpleNamespace(router_replay_action=None, target_topk_idx=None)
        self.segment_context = SegmentContext()
        self.segment_context.take_routes(0, {self: routes})

    def run(self, routing):
        with self.segment_context.running(SEGMENT, keeps_for_backward=True):
            return _routing(self, routing)


def narrowed(rows, segment):
    return rows[segment.start : segment.end]


def out_of_range(rows, segment):
    raise IndexError("fewer rows than tokens")


def test_a_segment_is_replayed_by_its_own_rows():
    router = Router(Routes(RouterReplayAction.REPLAY_FORWARD, {"target_topk_idx": ROWS}, narrowed))
    seen = router.run(lambda: vars(router.router_replay).copy())
    assert seen["router_replay_action"] is RouterReplayAction.REPLAY_FORWARD
    assert torch.equal(seen["target_topk_idx"], ROWS[4:])
    assert router.router_replay == SimpleNamespace(router_replay_action=None, target_topk_idx=None)


def test_after_a_failure_a_router_has_what_the_program_set():
    """A program that goes on must not replay the routes of another micro-batch."""
    router = Router(Routes(RouterReplayAction.REPLAY_FORWARD, {"target_topk_idx": ROWS}, out_of_range))
    with pytest.raises(IndexError, match="fewer rows"):
        router.run(lambda: None)
    assert router.router_replay == SimpleNamespace(router_replay_action=None, target_topk_idx=None)
