"""The step predicted: a schedule with costs and communication, in simulated time. Start with step."""

from .blocking import execute_blocking
from .estimate import StepEstimate, estimate_step
from .lowered import ChunkCollectives, execute_lowered
from .step import Prediction, predict, shortest

__all__ = [
    "ChunkCollectives",
    "Prediction",
    "StepEstimate",
    "estimate_step",
    "execute_blocking",
    "execute_lowered",
    "predict",
    "shortest",
]
