"""Running a schedule: the interpreter of its actions, messages, losses, gradient reduction and traces."""

from .executor import PipelineExecutor
from .meter import Reading, StepMeter
from .recorder import UpstreamSteps, trace_collectives
from .segmentation import Packing, Segmentation
from .tracer import Tracer

__all__ = [
    "Packing",
    "PipelineExecutor",
    "Reading",
    "Segmentation",
    "StepMeter",
    "Tracer",
    "UpstreamSteps",
    "trace_collectives",
]
