"""Checks that a schedule is complete and can run, and shows where it is wrong."""

from collections.abc import Collection, Sequence

from .action import BESIDE, Action, Unit
from .cost_tables import Costs
from .dependencies import dependencies, outcome
from .kinds import COMPUTE_KINDS, MOVE_KINDS, Holds, Kind
from .schedule import Place, Schedule, Shape
from .timing import run

# The kinds of actions that make a unit complete.
_WAYS = ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W})

_ACTIONS_SHOWN = 4  # on each side of the one at fault
_RANKS_SHOWN = 8


class ScheduleError(ValueError):
    """A schedule that must not be run. The message shows the place, rank by rank."""

    has_picture = True


def validate(schedule: Schedule) -> None:
    """Raises ScheduleError unless every rank runs exactly what it must, in an order that can run.

    Each stage needs, for each unit, one F and either one B or one I and one W, all on the stage's rank. The orders of
    the ranks and the dependencies together must have no cycle. A unit may move to the memory of the host and back once,
    between its forward and its backward. The two actions of a pair need what either needs, and give nothing to each
    other.
    """
    if schedule.has_moves:
        for rank in range(len(schedule.ranks)):
            _check_moves(schedule, rank)
        schedule = schedule.without_moves()
    shape = schedule.shape
    if len(schedule.ranks) != shape.num_ranks:
        raise ScheduleError(f"{len(schedule.ranks)} ranks given, {shape.num_ranks} expected")
    for rank in range(shape.num_ranks):
        _check_complete(schedule, rank)
        _check_pairs(schedule, rank)
    _check_runs(schedule)


def _check_complete(schedule: Schedule, rank: int) -> None:
    shape = schedule.shape
    actions = schedule.ranks[rank]
    stages = shape.placement.stages_of(rank)
    kinds_of: dict[Unit, list[Kind]] = {(stage, *unit): [] for stage in stages for unit in shape.units}
    for index, action in enumerate(actions):
        kinds = kinds_of.get(action.unit)
        if action.kind not in COMPUTE_KINDS or kinds is None:
            raise _error(schedule, rank, index, f"is no compute action of this rank; there are {shape}")
        if action.kind in kinds:
            raise _error(schedule, rank, index, "is repeated")
        kinds.append(action.kind)
    for unit, kinds in kinds_of.items():
        if set(kinds) not in _WAYS:
            stage, microbatch, segment = unit
            place = _first_of_microbatch(actions, stage, microbatch)
            raise ScheduleError(
                f"rank {rank}: stage {stage}, micro-batch {microbatch}, segment {segment} has "
                f"{' and '.join(kinds) or 'no action'}; each unit needs F and B, or F, I and W\n"
                + neighbourhood(schedule, rank, [place] * shape.num_ranks)
            )


def _first_of_microbatch(actions: Sequence[Action], stage: int, microbatch: int) -> int:
    """The index of the first action of a micro-batch on a stage, or of the last action of the rank if there is none."""
    for index, action in enumerate(actions):
        if (action.stage, action.microbatch) == (stage, microbatch):
            return index
    return max(len(actions) - 1, 0)


def _check_pairs(schedule: Schedule, rank: int) -> None:
    actions = schedule.ranks[rank]
    for index, action in enumerate(actions):
        if action not in schedule.paired:
            continue
        beside = actions[index + 1] if index + 1 < len(actions) else None
        if action.kind is not Kind.F or beside is None or not beside.kind.facts.gives_input_gradient:
            words = "nothing" if beside is None else beside
            raise _error(schedule, rank, index, f"is paired with {words}; a pair is a forward and a B or an I after it")
        if action.unit == beside.unit:
            raise _error(schedule, rank, index, f"runs beside {beside}, which needs it")


def _check_moves(schedule: Schedule, rank: int) -> None:
    last: dict[Unit, Kind] = {}
    actions = schedule.ranks[rank]
    for index, action in enumerate(actions):
        kind = action.kind
        before = last.get(action.unit)
        if kind in MOVE_KINDS and index and actions[index - 1] in schedule.paired:
            raise _error(schedule, rank, index, "parts the two of a pair; put it before or behind them")
        if kind is Kind.OFFLOAD and before is not Kind.F:
            raise _error(schedule, rank, index, "does not follow the forward of its unit")
        if kind is Kind.RELOAD and before is not Kind.OFFLOAD:
            raise _error(schedule, rank, index, "reloads activations that are not on the host")
        if kind.facts.before is Holds.ACTIVATIONS and kind in COMPUTE_KINDS and before is Kind.OFFLOAD:
            raise _error(schedule, rank, index, "needs activations that are on the host; RELOAD them before")
        last[action.unit] = kind


def _check_runs(schedule: Schedule) -> None:
    """Runs the schedule; if ranks get stuck, raises an error with the broken rule or the cycle."""
    done = [len(spans) for spans in run(schedule, Costs.uniform(schedule.shape))]
    stuck = [rank for rank, actions in enumerate(schedule.ranks) if done[rank] < len(actions)]
    if not stuck:
        return
    ran = {outcome(action) for rank, actions in enumerate(schedule.ranks) for action in actions[: done[rank]]}
    waits: dict[int, str] = {}  # rank -> what it waits for, in the order of the walk
    rank = stuck[0]
    while rank not in waits:
        place = _next_place(schedule, rank, done[rank])  # at which the rank is stuck
        action, needed = _first_need(place, schedule.shape, ran)
        owner = schedule.shape.placement.rank_of(needed.stage)
        if needed not in schedule.ranks[owner]:  # the needed backward is split
            needed = needed._replace(kind=Kind.I)
        if owner == rank:
            is_ascending = action.kind is not Kind.F and needed.segment > action.segment
            rule = ": segments go backward in descending order" if is_ascending else ""
            index = schedule.ranks[rank].index(action)
            raise _error(schedule, rank, index, f"comes before {needed}, which it needs{rule}")
        ahead = _next_place(schedule, owner, done[owner])
        waits[rank] = f"rank {rank}: {_text_of(place)} needs {needed} of rank {owner}"
        if needed not in ahead:
            waits[rank] += f", where {_text_of(ahead)} comes first"
        elif len(ahead) > 1:
            waits[rank] += f", which runs in {_text_of(ahead)}"
        rank = owner
    lines = ["the schedule deadlocks; each of these waits for the next, in a cycle:"]
    # The walk may have come to the cycle from outside; it ended at the first rank that it met again.
    walk = list(waits)
    lines += [waits[waiting] for waiting in walk[walk.index(rank) :]]
    raise ScheduleError("\n".join([*lines, neighbourhood(schedule, rank, done)]))


def _next_place(schedule: Schedule, rank: int, index: int) -> Place:
    """The action at an index of a rank, or the pair that begins with it."""
    actions = schedule.ranks[rank]
    size = 2 if actions[index] in schedule.paired else 1
    return actions[index : index + size]


def _text_of(place: Place) -> str:
    return BESIDE.join(map(str, place))


def _first_need(place: Place, shape: Shape, ran: Collection[Action]) -> tuple[Action, Action]:
    """The first action of a place whose need has not run, and that need."""
    for action in place:
        for need in dependencies(action, shape):
            if need not in ran:
                return action, need
    raise AssertionError(f"{_text_of(place)} can run")


def _error(schedule: Schedule, rank: int, index: int, problem: str) -> ScheduleError:
    text = f"rank {rank}, action {index}: {schedule.ranks[rank][index]} {problem}"
    return ScheduleError(f"{text}\n{neighbourhood(schedule, rank, [index] * len(schedule.ranks))}")


def neighbourhood(schedule: Schedule, rank: int, at: Sequence[int]) -> str:
    """The ranks near `rank`, a line each: the actions near its index in `at`, with that action in brackets."""
    first = max(0, min(rank - _RANKS_SHOWN // 2, len(schedule.ranks) - _RANKS_SHOWN))
    lines = []
    for other in range(first, min(first + _RANKS_SHOWN, len(schedule.ranks))):
        actions = schedule.ranks[other]
        low = max(0, at[other] - _ACTIONS_SHOWN)
        high = min(len(actions), at[other] + _ACTIONS_SHOWN + 1)
        words = [f"[{actions[n]}]" if n == at[other] else f" {actions[n]} " for n in range(low, high)]
        if low > 0:
            words.insert(0, "...")
        if high < len(actions):
            words.append("...")
        mark = ">" if other == rank else " "
        lines.append(f"{mark} rank {other:<3} {' '.join(words)}".rstrip())
    return "\n".join(lines)
