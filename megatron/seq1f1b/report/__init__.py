"""Pictures and traces of simulated and measured timelines."""

from .figure import plot_timelines
from .trace import to_trace, write_trace

__all__ = ["plot_timelines", "to_trace", "write_trace"]
