"""Where a sequence is cut: the lengths of its segments. Pure Python."""

from .cost import StageCost, Time, analytic_costs, slowest
from .cut import STRATEGIES, cut_sequence
from .errors import SplitError
from .even import even
from .model_shape import Experts, LatentAttention, ModelShape
from .rates import A100, CPU_CORE, Rates
from .uniform_comp import uniform_comp

__all__ = [
    "A100",
    "CPU_CORE",
    "STRATEGIES",
    "Experts",
    "LatentAttention",
    "ModelShape",
    "Rates",
    "SplitError",
    "StageCost",
    "Time",
    "analytic_costs",
    "cut_sequence",
    "even",
    "slowest",
    "uniform_comp",
]
