"""The step predicted: a schedule with costs and communication, in simulated time. Start with step."""

from .estimate import StepEstimate, estimate_step
from .long_step import LongStep, predict_long
from .lowered import ChunkCollectives, execute_lowered
from .step import Prediction, predict, shortest

__all__ = [
    "ChunkCollectives",
    "LongStep",
    "Prediction",
    "StepEstimate",
    "estimate_step",
    "execute_lowered",
    "predict",
    "predict_long",
    "shortest",
]
