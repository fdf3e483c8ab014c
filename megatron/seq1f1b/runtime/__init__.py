"""Running a schedule: the interpreter of its actions, messages, losses, gradient reduction and traces."""

from .executor import PipelineExecutor
from .recorder import Reading
from .repacking import Repacking
from .segmentation import Packing, Segmentation
from .tracer import Tracer, run_traced
