"""Which configuration for a model, a cluster and a batch. Start with question and search."""

from .explain import breakdown
from .presets import PRESETS, preset
from .search import Plan, Search, plan, predict_candidate, way_out
from .space import Candidate, Question, candidates
from .time_to_train import LAWS, BatchLaw, Training, device_counts, soonest

__all__ = [
    "LAWS",
    "PRESETS",
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
    "preset",
    "soonest",
    "way_out",
]
