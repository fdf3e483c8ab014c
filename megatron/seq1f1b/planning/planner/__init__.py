"""Which configuration for a model, a cluster and a batch. Start with question and search."""

from .explain import breakdown
from .presets import PRESETS, preset
from .search import Plan, Search, plan, predict_candidate, way_out
from .space import Candidate, Question, candidates
from .time_to_train import LAWS, BatchLaw, Training, batch_law, device_counts, lean, soonest

__all__ = [
    "LAWS",
    "PRESETS",
    "BatchLaw",
    "Candidate",
    "Plan",
    "Question",
    "Search",
    "Training",
    "batch_law",
    "breakdown",
    "candidates",
    "device_counts",
    "lean",
    "plan",
    "predict_candidate",
    "preset",
    "soonest",
    "way_out",
]
