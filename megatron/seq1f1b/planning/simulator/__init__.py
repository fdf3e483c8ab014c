"""The step predicted: a schedule with costs and communication, in simulated time. Start with step."""

from .estimate import StepEstimate, estimate_step, from_short_steps
from .lowered import ChunkCollectives, execute_lowered
from .step import Prediction, predict, shortest

__all__ = [
    "ChunkCollectives",
    "Prediction",
    "StepEstimate",
    "estimate_step",
    "execute_lowered",
    "from_short_steps",
    "predict",
    "shortest",
]
