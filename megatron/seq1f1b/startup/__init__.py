"""The start of a training script, and how it ends where it cannot go on.

Our checks come before Megatron's, all of them before the first second of work; what fails is one sentence.
"""

from .command_line import CommandLine
from .ending import end, failures_recorded
from .explaining import explained
from .training_loop import TrainingLoop

__all__ = ["CommandLine", "TrainingLoop", "end", "explained", "failures_recorded"]
