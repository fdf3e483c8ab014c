"""Schedules as CSV: one row for each rank, one action in each cell, such as `2F3.1`, or a pair, `2F3.1|2B1.0`."""

import csv
from io import StringIO
from itertools import chain
from pathlib import Path

from ..schedule import (
    COMPUTE_KINDS,
    MOVE_KINDS,
    Action,
    Placement,
    Schedule,
    ScheduleError,
    Shape,
    parse_action,
    validate,
)
from ..schedule.action import BESIDE
from .reading import read_text
from .writing import written_whole


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write one row for each rank, an action a cell; `read_schedule` is the inverse."""
    with written_whole(path) as unfinished, open(unfinished, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(map(schedule.texts, range(len(schedule.ranks))))


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule of compute actions and moves, and validate it. Its sizes follow from the actions in the file.

    Empty cells and rows are skipped, and a missing segment is segment 0 (`2F3` is `2F3.0`). The placement follows from
    the ranks of the stages. Raises ScheduleError with the name of the file, and with row and cell of what is no action.
    """
    paired: set[Action] = set()
    reader = csv.reader(StringIO(read_text(path), newline=""))
    ranks = []
    where = ""  # the row and the cell at which an error is raised
    try:
        for row_number, row in enumerate(reader, start=1):
            actions: list[Action] = []
            for cell_number, cell in enumerate(row, start=1):
                if not cell.strip():
                    continue
                where = f": row {row_number}, cell {cell_number}"
                place = _read_place(cell)
                actions += place
                if len(place) == 2:
                    paired.add(place[0])
            if actions:
                ranks.append(tuple(actions))
            where = ""
        schedule = Schedule(_shape_of(ranks), tuple(ranks), frozenset(paired))
        validate(schedule)
    except (csv.Error, ValueError) as error:
        raise ScheduleError(f"{path}{where}: {error}") from None
    return schedule


def _read_place(cell: str) -> list[Action]:
    """The action of a cell, or the two of a pair. Raises ValueError for any other text, and for kinds that a schedule
    of the user cannot have."""
    place = [parse_action(text) for text in cell.split(BESIDE)]
    if len(place) > 2:
        raise ValueError(f"{cell!r} is not an action or a pair of two, such as 2F3.1|2B1.0")
    known = COMPUTE_KINDS + MOVE_KINDS
    if any(action.kind not in known for action in place):
        *names, last_name = known
        raise ValueError(f"{cell!r} is not {', '.join(names)} or {last_name}; lowering adds the others")
    return place


def _shape_of(ranks: list[tuple[Action, ...]]) -> Shape:
    """The smallest shape that has all actions. Raises ValueError for stages that do not divide, or for gaps in
    numbers."""
    if not ranks:
        raise ValueError("it holds no actions; a row is a rank, and a cell an action such as 2F3.1")
    placement = _placement_of(ranks)
    segments: dict[int, int] = {}  # by micro-batch
    for action in chain.from_iterable(ranks):
        segments[action.microbatch] = max(segments.get(action.microbatch, 0), action.segment + 1)
    num_actions = sum(map(len, ranks))
    num_microbatches = 1 + max(segments)
    # Checked before anything is made of these sizes, since large numbers would cost memory. A micro-batch without
    # actions has one segment at least.
    fewest_units = sum(segments.values()) + num_microbatches - len(segments)
    if placement.num_stages * fewest_units > num_actions:
        largest = Shape(placement, num_microbatches, max(segments.values()))
        raise ValueError(f"its {num_actions} actions are fewer than the forwards of {largest}; number all from 0")
    return Shape.of(placement, [segments.get(microbatch, 1) for microbatch in range(num_microbatches)])


def _placement_of(ranks: list[tuple[Action, ...]]) -> Placement:
    num_ranks = len(ranks)
    num_stages = 1 + max(action.stage for rank in ranks for action in rank)
    if num_stages % num_ranks:
        raise ValueError(f"{num_stages} stages do not divide evenly over {num_ranks} rows")
    # The first stage of the second chunk is on the last rank if that chunk runs back.
    turns = num_ranks > 1 and any(action.stage == num_ranks for action in ranks[-1])
    return Placement(num_ranks, num_stages // num_ranks, "v" if turns else "looped")
