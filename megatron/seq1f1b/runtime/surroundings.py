"""Parts of a step that a rehearsal replaces.

Tested in functional_tests/test_rehearsal.py by test_a_launch_on_eight_gpus.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ..model import HostMemory, KernelChoice, KernelsOf
from .segments.segmentation import ReadCalls
from .segments.sequence_source import SequenceSource


@dataclass(frozen=True)
class Surroundings:
    """What a step meets outside its own code; by default, that of a real run.

    - `read_calls`: tells what the program's calls of its model are for, see `Segmentation`.
    - `source`: has the sequences of all replicas, for units.
    - `host_memory(layers_leaving)`: makes the memory of activations.
    - `kernels_of(configuration)`: chooses the kernels of attention for a model.
    """

    read_calls: ReadCalls | None = None
    source: SequenceSource | None = None
    host_memory: Callable[[int], HostMemory] = HostMemory
    kernels_of: KernelsOf = KernelChoice.of_config
