"""Pictures and traces of simulated and measured timelines, and of rehearsed memory."""

from .figure import plot_timelines
from .memory_figure import plot_memory
from .trace import to_trace, write_trace
