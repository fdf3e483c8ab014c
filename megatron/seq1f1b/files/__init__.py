"""Files of users. Each is read by a declared type, and an error names the place in the file."""

from .costs_file import read_costs
from .lengths import read_histogram, read_segment_lengths
from .timeline_file import Trace, read_timeline, read_trace
from .typed import At0, Count, Positive, Share, converted, read_json, read_rows, read_toml, with_way_out
