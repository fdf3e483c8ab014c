"""Which configuration for a model, a cluster and a batch. Start with question and search."""

from .explain import breakdown
from .flags import decided_flags, model_flags
from .presets import PRESETS, preset
from .question import Candidate, Question
from .search import Plan, Search, plan, predict_candidate
from .space import candidates
from .way_out import way_out

__all__ = [
    "PRESETS",
    "Candidate",
    "Plan",
    "Question",
    "Search",
    "breakdown",
    "candidates",
    "decided_flags",
    "model_flags",
    "plan",
    "predict_candidate",
    "preset",
    "way_out",
]
