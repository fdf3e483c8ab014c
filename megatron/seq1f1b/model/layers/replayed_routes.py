"""Experts of tokens that a program replays or records (Megatron's `moe_enable_routing_replay`), by segments.

Reinforcement learning replays in training which experts took each token of a rollout. A program hands the choices for a
whole micro-batch to the `RouterReplay` of each router before it calls its model, and reads recorded ones from there
after the call. Calls of several micro-batches are under way at a time, so what was set is noted with each call, and a
router gets the rows of the running segment, also where a forward is repeated in the backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ...process.patches import wrapping
from ..segment import Segment

# The values of the actions of Megatron and of verl, whose class takes the place of Megatron's.
_RECORD = "record"
_REPLAY = "replay_forward"
_REPEAT = "replay_backward"
# What has rows for tokens among the attributes of RouterReplay; verl's has a mask that says which are replayed.
_GIVEN = "target_topk_idx", "target_replay_mask"


@dataclass
class Routes:
    """What one router replays or records in one call. `given` are tensors [s b, ...] for s tokens of b sequences, in
    the order of the router's, by their names in RouterReplay; `recorded` are those of segments, by index."""

    action: Any
    given: dict[str, Tensor]
    part: Callable[[Tensor, Segment], Tensor]  # what a segment has of them, on this rank
    recorded: dict[int, Tensor] = field(default_factory=dict)


def routes_set_for(model: torch.nn.Module, part: Callable[[Tensor, Segment], Tensor]) -> dict[TopKRouter, Routes]:
    """What a program has told the routers of a model to replay or record. Raises ValueError for an action that is meant
    for a repeated forward."""
    routes_of = {}
    for router in model.modules():
        if not isinstance(router, TopKRouter):
            continue
        replay = getattr(router, "router_replay", None)
        action = getattr(replay, "router_replay_action", None)
        if action is None:
            continue
        if action.value == _REPEAT:
            raise ValueError(
                "a model is called while its routers replay the routes of a repeated forward (REPLAY_BACKWARD); set "
                "REPLAY_FORWARD before each call"
            )
        given = {}
        if action.value == _REPLAY:
            rows_of = {name: getattr(replay, name, None) for name in _GIVEN}
            given = {name: rows for name, rows in rows_of.items() if rows is not None}
        routes_of[router] = Routes(action, given, part)
    return routes_of


def _routing(router: TopKRouter, routing: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Choose the experts of a segment as the program has set it for the micro-batch."""
    context = router.segment_context
    routes = context.routes_of(router)
    if routes is None:
        return routing(*args, **options)
    with _set_for(router.router_replay, routes, context.segment):
        return routing(*args, **options)


@contextmanager
def _set_for(replay: Any, routes: Routes, segment: Segment) -> Iterator[None]:
    """Inside, a RouterReplay has the action and the rows of a segment; after it, also after a failure, what the program
    has set."""
    before = {name: getattr(replay, name) for name in ("router_replay_action", *routes.given)}
    try:
        replay.router_replay_action = routes.action
        for name, rows in routes.given.items():
            setattr(replay, name, routes.part(rows, segment))
        yield
    finally:
        for name, value in before.items():
            setattr(replay, name, value)
    if routes.action.value == _RECORD:
        routes.recorded[segment.index] = replay.recorded_topk_idx


SEGMENT_PATCHES = (
    wrapping(
        "megatron.core.transformer.moe.router.TopKRouter.routing",
        _routing,
        "replays the routes of whole micro-batches",
    ),
)
