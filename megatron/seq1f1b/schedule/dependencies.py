"""The dependencies of an action, stated once for every use of a schedule."""

from .action import Action, Kind
from .schedule import Shape


def dependencies(action: Action, shape: Shape) -> tuple[Action, ...]:
    """The compute actions that have to end before this compute action starts.

    A `B` among them stands for the backward that computes the input gradient, so an `I` of the same unit satisfies it
    too (see `outcome`). Segments go forward in order and backward in reverse (arXiv 2406.03488, section 3), because
    later segments use the keys and values of earlier ones.
    """
    kind, stage, microbatch, segment = action
    needs = []
    if kind is Kind.F:
        if stage > 0:
            needs.append(Action(Kind.F, stage - 1, microbatch, segment))
        if segment > 0:
            needs.append(Action(Kind.F, stage, microbatch, segment - 1))
    elif kind in (Kind.B, Kind.I):
        needs.append(Action(Kind.F, stage, microbatch, segment))
        if stage < shape.num_stages - 1:
            needs.append(Action(Kind.B, stage + 1, microbatch, segment))
        if segment < shape.segments_of(microbatch) - 1:
            needs.append(Action(Kind.B, stage, microbatch, segment + 1))
    elif kind is Kind.W:
        needs.append(Action(Kind.B, stage, microbatch, segment))
    else:
        raise ValueError(f"{action} is not a compute action")
    return tuple(needs)


def outcome(action: Action) -> Action:
    """The action as `dependencies` refers to it: an I becomes the B of its unit."""
    return action._replace(kind=Kind.B) if action.kind is Kind.I else action


def message_needed(action: Action, shape: Shape) -> Action | None:
    """The dependency at the neighbouring stage if that is on another rank, else None."""
    rank_of = shape.placement.rank_of
    messages = (each for each in dependencies(action, shape) if rank_of(each.stage) != rank_of(action.stage))
    return next(messages, None)
