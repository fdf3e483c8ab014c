"""The step predicted: a schedule with costs and communication, in simulated time. Start with step."""

from .estimate import extended
from .lowered import ChunkCollectives, execute_lowered
from .step import Prediction, predict

__all__ = [
    "ChunkCollectives",
    "Prediction",
    "execute_lowered",
    "extended",
    "predict",
]
