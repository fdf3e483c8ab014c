"""Where a sequence is cut: the lengths of its segments. Pure Python; of this package only errors is imported.

Start with cut (the strategies). The time of a segment is a function that the caller passes (segment_time).
"""

from .balanced import balanced
from .cut import DEFAULT_STRATEGY, STRATEGIES, Strategy, cut_sequence, even
from .cut_positions import segment_multiple
from .documents import balanced_by_documents, within_documents
from .lengths_file import check_lengths, read_lengths
from .segment_time import SegmentTime, segment_times
from .terapipe import terapipe
from .uniform_comp import uniform_comp

__all__ = [
    "DEFAULT_STRATEGY",
    "STRATEGIES",
    "SegmentTime",
    "Strategy",
    "balanced",
    "balanced_by_documents",
    "check_lengths",
    "cut_sequence",
    "even",
    "read_lengths",
    "segment_multiple",
    "segment_times",
    "terapipe",
    "uniform_comp",
    "within_documents",
]
