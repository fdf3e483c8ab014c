"""Where a sequence is cut: the lengths of its segments. Pure Python, with nothing else of this package.

Start with cut (the strategies). The time of a segment is a function that the caller passes.
"""

from .balanced import balanced, uniform_comp, within_documents
from .cut import DEFAULT_STRATEGY, STRATEGIES, cut_sequence
from .lengths import SegmentTime, Task, check_lengths, even, segment_multiple, segment_times
from .summed_time import SlowestTime
from .terapipe import terapipe
from .units import Pack, packs_of_step, work_by_flops
