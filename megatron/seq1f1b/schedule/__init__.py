"""When each rank does what: schedules as plain data. Start with action, dependencies, clock.

Pure Python: nothing of torch, Megatron or the rest of this package is imported here.
"""

from .action import Action, Kind, parse_action
from .auto import auto
from .build import FAMILY_NAMES, build, program, program_of
from .choice import CostsOfLengths, Given, Named, Planned, ScheduleChoice, choose, splitting_families
from .costs import Costs
from .csv_file import read_csv, write_csv
from .dependencies import dependencies
from .families import FAMILIES
from .files import UNUSABLE, read_json, reason
from .lowering import Channel, channel_of, lower
from .memory import peak_memory, peak_units
from .placement import PLACEMENTS, Placement
from .schedule import Schedule, Shape
from .timeline import Span, Timeline, read_timeline, write_timeline
from .timing import simulate
from .validate import ScheduleError, validate

__all__ = [
    "FAMILIES",
    "FAMILY_NAMES",
    "UNUSABLE",
    "Action",
    "Channel",
    "Costs",
    "CostsOfLengths",
    "Given",
    "Kind",
    "Named",
    "PLACEMENTS",
    "Placement",
    "Planned",
    "Schedule",
    "ScheduleChoice",
    "ScheduleError",
    "Shape",
    "Span",
    "Timeline",
    "auto",
    "build",
    "channel_of",
    "choose",
    "dependencies",
    "lower",
    "parse_action",
    "peak_memory",
    "peak_units",
    "program",
    "program_of",
    "read_csv",
    "read_json",
    "read_timeline",
    "reason",
    "simulate",
    "splitting_families",
    "validate",
    "write_csv",
    "write_timeline",
]
