"""Which configuration for a model, a cluster and a batch. Start with question and search."""

from .gain import Gain
from .search import Plan, Search, predict_candidate
from .space import Candidate, Question, candidates
from .time_to_train import LAWS, BatchLaw, Training, soonest
from .way_out import by_use, way_out

__all__ = [
    "LAWS",
    "BatchLaw",
    "Candidate",
    "Gain",
    "Plan",
    "Question",
    "Search",
    "Training",
    "by_use",
    "candidates",
    "predict_candidate",
    "soonest",
    "way_out",
]
