"""Where a sequence is cut: the lengths of its segments. Pure Python, with nothing else of this package.

Start with cut (the strategies). The time of a segment is a function that the caller passes.
"""

from .balanced import balanced, within_documents
from .by_formula import even, uniform_comp
from .cut import DEFAULT_STRATEGY, STRATEGIES, Task, cut_sequence
from .cut_positions import SegmentTime, segment_multiple, segment_times
from .lengths_file import check_lengths, read_lengths
from .terapipe import terapipe
from .units import Pack, packs_of_step, work_by_flops
