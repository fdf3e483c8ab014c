"""Where a sequence is cut: the lengths of its segments. Pure Python."""

from .cut import STRATEGIES, cut_sequence
from .errors import SplitError
from .even import even
from .model_shape import ModelShape
from .uniform_comp import uniform_comp

__all__ = ["STRATEGIES", "ModelShape", "SplitError", "cut_sequence", "even", "uniform_comp"]
