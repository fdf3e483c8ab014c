"""Schedules as plain data: the actions of each rank, in order. Start with kinds, action, dependencies, clock.

Pure Python: nothing of torch, Megatron or the rest of this package is imported here.
"""

from .action import Action, Unit, parse_action
from .automatic import auto
from .choice import FAMILY_NAMES, CostsOfLengths, ScheduleChoice, build, splitting_families
from .clock import Clock
from .cost_tables import Costs, peak_memory, sequences_held
from .dependencies import dependencies
from .families import FAMILIES, PAIRED, clock_of
from .kinds import CHUNK_KINDS, COMPUTE_KINDS, FACTS, MOVE_KINDS, PAYLOADS, Holds, Kind, Lane
from .lowering import Channel, channels_of, lower, lower_rank, partition_state
from .moves import moved, units_to_move, with_moves
from .pairs import with_pairs
from .schedule import PLACEMENTS, Placement, Schedule, Shape
from .timeline import Span, Timeline, busy_time
from .timing import simulate
from .validate import ScheduleError, validate
