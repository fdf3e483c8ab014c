"""Which configuration for a model, a cluster and a batch. Start with question and search."""

from .critical_batch import LAWS, BatchLaw, batch_law
from .explain import breakdown
from .presets import PRESETS, preset
from .question import Candidate, Question
from .search import Plan, Search, plan, predict_candidate
from .space import candidates
from .time_to_train import Training, device_counts, lean, soonest
from .way_out import way_out

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
