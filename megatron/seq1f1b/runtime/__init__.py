"""Running a schedule: the interpreter of its actions, messages, losses, gradient reduction and traces."""

from .activation_memory import ActivationMemory
from .executor import MESSAGE_TIMEOUT, PipelineExecutor, watched
from .program_contract import ProgramContract
from .recording.recorder import Reading, StepRecorder
from .recording.tracer import StepTracer, Tracer
from .segments.repacking import Repacking
from .segments.segmentation import Segmentation
from .surroundings import Surroundings
