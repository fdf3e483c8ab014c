"""Running a schedule: the interpreter of its actions, messages, losses, gradient reduction and traces."""

from .executor import PipelineExecutor, watched
from .repacking import Repacking
from .segmentation import Segmentation
from .surroundings import Surroundings
from .tracer import Reading, StepRecorder, StepTracer, Tracer
