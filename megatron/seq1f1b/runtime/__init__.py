"""Running a schedule: the interpreter of its actions, messages, losses, gradient reduction and traces."""

from .activation_memory import ActivationMemory
from .executor import MESSAGE_TIMEOUT, PipelineExecutor, watched
from .program_contract import ProgramContract
from .recorder import Reading, StepRecorder
from .repacking import Repacking
from .segmentation import Segmentation
from .surroundings import Surroundings
from .tracer import StepTracer, Tracer
