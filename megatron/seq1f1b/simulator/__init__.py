"""The step predicted: a schedule with costs and communication, in simulated time. Start with step."""

from .blocking import execute_blocking
from .step import Prediction, predict

__all__ = ["Prediction", "execute_blocking", "predict"]
