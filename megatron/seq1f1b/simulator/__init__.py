"""The step predicted: a schedule with costs and communication, in simulated time. Start with step."""

from .blocking import execute_blocking
from .estimate import StepEstimate, estimate_step
from .step import Prediction, predict

__all__ = ["Prediction", "StepEstimate", "estimate_step", "execute_blocking", "predict"]
