"""Doing it: the interpreter of a schedule, its messages, losses, gradient reduction and traces."""

from .collectives import trace_collectives
from .documents import Packing
from .executor import PipelineExecutor
from .meter import Reading, StepMeter
from .tracer import Tracer
from .upstream_steps import UpstreamSteps

__all__ = ["Packing", "PipelineExecutor", "Reading", "StepMeter", "Tracer", "UpstreamSteps", "trace_collectives"]
