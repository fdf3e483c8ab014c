"""When each rank does what: schedules as plain data. Start with action, dependencies, clock.

Pure Python: nothing of torch, Megatron or the rest of this package is imported here.
"""

from .action import Action, Kind, parse_action
from .costs import Costs
from .dependencies import dependencies
from .families import FAMILIES, build, compute_order
from .lowering import Channel, channel_of, lower, lower_rank
from .placement import Placement
from .program import program
from .schedule import Schedule, Shape
from .memory import peak_memory, peak_units
from .timeline import Span, Timeline, read_timeline, write_timeline
from .timing import simulate
from .validate import ScheduleError, validate

__all__ = [
    "FAMILIES",
    "Action",
    "Channel",
    "Costs",
    "Kind",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Shape",
    "Span",
    "Timeline",
    "build",
    "channel_of",
    "compute_order",
    "dependencies",
    "lower",
    "lower_rank",
    "parse_action",
    "peak_memory",
    "peak_units",
    "program",
    "read_timeline",
    "simulate",
    "validate",
    "write_timeline",
]
