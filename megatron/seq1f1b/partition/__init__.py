"""Where a sequence is cut: the lengths of its segments. Pure Python.

Start with cut (the strategies) and cost (what a segment costs on a stage).
"""

from .balanced import balanced, segment_costs
from .cost import AnalyticTime, StageCost, Time, analytic_costs, slowest
from .cut import STRATEGIES, STRATEGIES_BY_COST, STRATEGIES_BY_DOCUMENTS, cut_sequence
from .documents import balanced_by_documents, within_documents
from .errors import SplitError
from .even import even
from .joint import Part, terapipe_joint
from .lengths_file import check_lengths, read_lengths
from .model_shape import Experts, LatentAttention, ModelShape
from .profile import FitError, Measurement, Profile, check_profile, read_profile, write_profile
from .rates import A100, CPU_CORE, Rates
from .terapipe import terapipe
from .uniform_comp import uniform_comp

__all__ = [
    "A100",
    "CPU_CORE",
    "STRATEGIES",
    "STRATEGIES_BY_COST",
    "STRATEGIES_BY_DOCUMENTS",
    "AnalyticTime",
    "Experts",
    "FitError",
    "LatentAttention",
    "Measurement",
    "ModelShape",
    "Part",
    "Profile",
    "Rates",
    "SplitError",
    "StageCost",
    "Time",
    "analytic_costs",
    "balanced",
    "balanced_by_documents",
    "check_lengths",
    "check_profile",
    "cut_sequence",
    "even",
    "read_lengths",
    "read_profile",
    "segment_costs",
    "slowest",
    "terapipe",
    "terapipe_joint",
    "uniform_comp",
    "within_documents",
    "write_profile",
]
