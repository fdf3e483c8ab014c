"""The dependencies of an action, for every use of a schedule; `kinds.py` states them.

Tested in schedule/test_validate.py.
"""

from .action import Action
from .kinds import COMPUTE_KINDS
from .schedule import Shape


def dependencies(action: Action, shape: Shape) -> tuple[Action, ...]:
    """The compute actions that have to end before this compute action starts.

    A `B` among them stands for the backward that computes the input gradient, so an `I` of the same unit satisfies it
    too (see `outcome`). Segments go forward in order and backward in reverse (arXiv 2406.03488, section 3), because
    later segments use the keys and values of earlier ones.
    """
    kind, stage, microbatch, segment = action
    if kind not in COMPUTE_KINDS:
        raise ValueError(f"{action} is not a compute action")
    needed = []
    for need in kind.facts.needs:
        needed_stage = stage + need.stage
        needed_segment = segment + need.segment
        if 0 <= needed_stage < shape.num_stages and 0 <= needed_segment < shape.segments_of(microbatch):
            needed.append(Action(need.kind, needed_stage, microbatch, needed_segment))
    return tuple(needed)


def outcome(action: Action) -> Action:
    """The action as `dependencies` refers to it: an I becomes the B of its unit."""
    kind = action.kind.facts.outcome
    return action if kind in (action.kind, None) else action._replace(kind=kind)


def message_needed(action: Action, shape: Shape) -> Action | None:
    """The dependency at the neighbouring stage if that is on another rank, else None."""
    rank_of = shape.placement.rank_of
    for needed in dependencies(action, shape):
        if rank_of(needed.stage) != rank_of(action.stage):
            return needed
    return None
