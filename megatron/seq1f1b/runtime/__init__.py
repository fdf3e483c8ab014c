"""Running a schedule: the interpreter of its actions, messages, losses, gradient reduction and traces."""

from .executor import PipelineExecutor, watched
from .recorder import Reading, StepRecorder
from .repacking import Repacking
from .segmentation import Segmentation
from .surroundings import Surroundings
from .tracer import StepTracer, Tracer
