"""Which configuration for a model, a cluster and a batch. Start with space (the choices) and search (the best)."""

from .search import Plan, plan, why_none
from .space import Candidate, Question, candidates
from .time_to_train import CRITICAL_BATCH_LAWS, TimeToTrain, time_to_train

__all__ = [
    "CRITICAL_BATCH_LAWS",
    "Candidate",
    "Plan",
    "Question",
    "TimeToTrain",
    "candidates",
    "plan",
    "time_to_train",
    "why_none",
]
