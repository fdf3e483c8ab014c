"""Which configuration for a model, a cluster and a batch. Start with question and search."""

from .explain import breakdown
from .search import Plan, Search, plan, predict_candidate
from .space import Candidate, Question, candidates
from .time_to_train import LAWS, BatchLaw, Training, device_counts, soonest
from .way_out import way_out

__all__ = [
    "LAWS",
    "BatchLaw",
    "Candidate",
    "Plan",
    "Question",
    "Search",
    "Training",
    "breakdown",
    "candidates",
    "device_counts",
    "plan",
    "predict_candidate",
    "soonest",
    "way_out",
]
