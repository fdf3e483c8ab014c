"""The routes of a call on one rank. Of ranks that divide tokens, functional_tests/test_replayed_routes.py has them."""

import gc
import weakref
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from megatron.seq1f1b.model import Segment
from megatron.seq1f1b.runtime.model_calls.routes_of_call import RoutesOfCall

LENGTH, SEQUENCES, TOPK = 8, 2, 2
SEGMENTS = [Segment(0, 0, 0, 5, LENGTH), Segment(0, 1, 5, 8, LENGTH)]
ROWS = torch.arange(LENGTH * SEQUENCES * TOPK).view(-1, TOPK)  # [s b, k]


def model_with(action: RouterReplayAction) -> torch.nn.Module:
    """A model with one router, whose program has set its routes."""
    router = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.router_replay = SimpleNamespace(router_replay_action=action, target_topk_idx=ROWS, recorded_topk_idx=None)
    return torch.nn.ModuleList([router])


def test_a_segment_has_the_rows_of_its_tokens():
    model = model_with(RouterReplayAction.REPLAY_FORWARD)
    (routes,) = RoutesOfCall(model, shares=None, sequence_parallel=None).by_router.values()
    parts = [routes.part(routes.given["target_topk_idx"], segment) for segment in SEGMENTS]
    assert [len(part) for part in parts] == [5 * SEQUENCES, 3 * SEQUENCES]
    assert torch.equal(torch.cat(parts), ROWS)


def test_recorded_routes_return_as_those_of_the_micro_batch():
    model = model_with(RouterReplayAction.RECORD)
    call = RoutesOfCall(model, shares=None, sequence_parallel=None)
    (routes,) = call.by_router.values()
    for segment in reversed(SEGMENTS):  # in any order
        routes.recorded[segment.index] = ROWS[SEQUENCES * segment.start : SEQUENCES * segment.end]
    call.return_recorded(SEGMENTS)
    assert torch.equal(model[0].router_replay.recorded_topk_idx, ROWS)
    assert not routes.recorded


def test_routes_of_a_call_are_in_no_reference_cycle():
    """A cycle would keep the rows of every micro-batch on the device until a collection."""
    gc.collect()
    gc.disable()
    try:
        call = RoutesOfCall(model_with(RouterReplayAction.REPLAY_FORWARD), shares=None, sequence_parallel=None)
        gone = weakref.ref(call)
        del call
        assert gone() is None
    finally:
        gc.enable()
