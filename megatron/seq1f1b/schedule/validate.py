"""Is a schedule of compute actions complete and can it run? If not, where is it wrong?"""

from .action import COMPUTE_KINDS, Action, Kind
from .cost_tables import Costs
from .dependencies import dependencies, outcome
from .schedule import Schedule, Shape
from .timing import run

_AROUND = 4  # actions shown on each side
_RANKS = 8  # ranks shown


class ScheduleError(ValueError):
    """A schedule that must not be run. The message shows the place, rank by rank."""


def validate(schedule: Schedule) -> None:
    """Raises ScheduleError unless every rank runs exactly what it must, in an order that can run.

    Each stage needs, for each unit, one F and either one B or one I and one W, all on the stage's rank. The orders of
    the ranks and the dependencies together must have no cycle. A unit may move to the memory of the host and back once,
    between its forward and its backward.
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
    _check_runs(schedule)


def _check_complete(schedule: Schedule, rank: int) -> None:
    shape = schedule.shape
    kinds_of = {(stage, *unit): "" for stage in shape.placement.stages_of(rank) for unit in shape.units}
    for index, action in enumerate(schedule.ranks[rank]):
        kind, unit = action.kind, action[1:]
        if kind not in COMPUTE_KINDS or unit not in kinds_of:
            raise _error(schedule, rank, index, _why_foreign(shape, action))
        if kind in kinds_of[unit]:
            raise _error(schedule, rank, index, "is repeated")
        kinds_of[unit] += kind
    for unit, kinds in kinds_of.items():
        problem = _problem({*kinds})
        if problem is not None:
            raise _missing(schedule, rank, Action(Kind.F, *unit), problem)


def _check_moves(schedule: Schedule, rank: int) -> None:
    last: dict[tuple[int, ...], Kind] = {}
    for index, action in enumerate(schedule.ranks[rank]):
        kind, before = action.kind, last.get(action[1:])
        if kind is Kind.OFFLOAD and before is not Kind.F:
            raise _error(schedule, rank, index, "does not follow the forward of its unit")
        if kind is Kind.RELOAD and before is not Kind.OFFLOAD:
            raise _error(schedule, rank, index, "brings back what is not in the memory of the host")
        if kind in (Kind.B, Kind.I) and before is Kind.OFFLOAD:
            raise _error(schedule, rank, index, "needs what is in the memory of the host; RELOAD it before")
        last[action[1:]] = kind


def _problem(kinds: set[str]) -> str | None:
    """What is wrong with the kinds of action of a unit, if anything."""
    if "F" not in kinds:
        return "has no F"
    if "B" in kinds and kinds & {"I", "W"}:
        return "has a B and also I or W"
    if "I" in kinds and "W" not in kinds:
        return "has an I without its W"
    if "W" in kinds and "I" not in kinds:
        return "has a W without its I"
    return None if kinds & {"B", "I"} else "has no backward"


def _why_foreign(shape: Shape, action: Action) -> str:
    if action.kind not in COMPUTE_KINDS:
        return "is not a compute action; lowering adds the others"
    if not 0 <= action.stage < shape.num_stages:
        return f"has no such stage; there are {shape.num_stages}"
    if not 0 <= action.microbatch < shape.num_microbatches:
        return f"has no such micro-batch; there are {shape.num_microbatches}"
    segments = shape.segments_of(action.microbatch)
    if not 0 <= action.segment < segments:
        return f"has no such segment; there are {segments}"
    return f"belongs to rank {shape.placement.rank_of(action.stage)}"


def _check_runs(schedule: Schedule) -> None:
    """Runs the schedule; if ranks get stuck, raises an error with the broken rule or the cycle."""
    done = [len(spans) for spans in run(schedule, Costs.uniform(schedule.shape))]
    stuck = [rank for rank, actions in enumerate(schedule.ranks) if done[rank] < len(actions)]
    if not stuck:
        return
    ran = {outcome(action) for rank, actions in enumerate(schedule.ranks) for action in actions[: done[rank]]}
    chain: dict[int, str] = {}  # rank -> what it waits for, in the order of the walk
    rank = stuck[0]
    while rank not in chain:
        action = schedule.ranks[rank][done[rank]]
        needed = next(need for need in dependencies(action, schedule.shape) if need not in ran)
        owner = schedule.shape.placement.rank_of(needed.stage)
        if needed not in schedule.ranks[owner]:  # its backward is split
            needed = needed._replace(kind=Kind.I)
        if owner == rank:
            raise _error(schedule, rank, done[rank], _why_too_early(action, needed))
        ahead = schedule.ranks[owner][done[owner]]
        chain[rank] = f"rank {rank}: {action} needs {needed} of rank {owner}" + (
            "" if ahead == needed else f", where {ahead} comes first"
        )
        rank = owner
    cycle = list(chain)[list(chain).index(rank) :]
    lines = ["the schedule deadlocks; each of these waits for the next, in a cycle:"]
    lines += [chain[member] for member in cycle]
    raise ScheduleError("\n".join(lines + [neighbourhood(schedule, rank, done)]))


def _why_too_early(action: Action, needed: Action) -> str:
    reason = f"comes before {needed}, which it needs"
    if action.kind is not Kind.F and needed.segment > action.segment:
        reason += ": segments go backward in descending order"
    return reason


def _missing(schedule: Schedule, rank: int, wanted: Action, problem: str) -> ScheduleError:
    """An error with the neighbourhood of the unit in the order of its rank."""
    actions = schedule.ranks[rank]
    unit = wanted[1:]
    same = [index for index, action in enumerate(actions) if action[1:] == unit]
    near = [index for index, action in enumerate(actions) if action[1:3] == unit[:2]]
    index = (same or near or [max(len(actions) - 1, 0)])[0]
    stage, microbatch, segment = unit
    text = f"rank {rank}: stage {stage}, micro-batch {microbatch}, segment {segment} {problem}"
    return ScheduleError(f"{text}\n{neighbourhood(schedule, rank, [index] * len(schedule.ranks))}")


def _error(schedule: Schedule, rank: int, index: int, problem: str) -> ScheduleError:
    text = f"rank {rank}, action {index}: {schedule.ranks[rank][index]} {problem}"
    return ScheduleError(f"{text}\n{neighbourhood(schedule, rank, [index] * len(schedule.ranks))}")


def neighbourhood(schedule: Schedule, rank: int, at: list[int]) -> str:
    """The ranks around `rank`, each around its index in `at`, with that action in brackets."""
    first = max(0, min(rank - _RANKS // 2, len(schedule.ranks) - _RANKS))
    lines = []
    for other in range(first, min(first + _RANKS, len(schedule.ranks))):
        actions, centre = schedule.ranks[other], at[other]
        low, high = max(0, centre - _AROUND), min(len(actions), centre + _AROUND + 1)
        words = [f"[{actions[index]}]" if index == centre else f" {actions[index]} " for index in range(low, high)]
        dots = ("... " if low > 0 else ""), (" ..." if high < len(actions) else "")
        mark = ">" if other == rank else " "
        lines.append(f"{mark} rank {other:<3} {dots[0]}{' '.join(words)}{dots[1]}".rstrip())
    return "\n".join(lines)
