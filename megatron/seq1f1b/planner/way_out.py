"""Why a question has no plan, and the nearest question that has one.

Tested in planner/test_search.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, takewhile

from ..costs.machine import GIB
from ..costs.step_memory import Memory
from ..costs.training_setup import TrainingSetup
from .fitting import host_in_flight, memory_in_flight
from .memory_bounds import least_bytes
from .search import Search
from .space import MemoryBudget, Question, cuts, numbers_of_segments, setups

_DOUBLINGS = 12
_LEANEST = 20  # set-ups of least memory that are predicted in full
_NUMBERS = (1, 8, 64)  # of segments
_SHORTEST = 1024


def way_out(question: Question, left_out: Sequence[str] = ()) -> ValueError:
    """The error for a question without a plan: no layout, or none that fits, with the uses of the fullest rank. The
    sentences `left_out` name features that its flags exclude: the answer where a plan with these would fit."""
    model = question.model
    if left_out and Search(replace(question, accepts=lambda candidate: True)).best(1):
        return ValueError(
            f"a plan that fits {question.memory_limit:.3g} GiB a device needs what the flags of the launch exclude; "
            f"drop one of these. {' '.join(left_out)}"
        )
    most = _leanest(question)
    if most is None:
        batch = -(-question.global_batch_size // question.num_devices) * question.num_devices
        return ValueError(
            f"no layout of {question.num_devices} devices divides a batch of {question.global_batch_size} sequences, "
            f"{model.num_layers} layers and {model.num_kv_heads or model.num_heads} heads; --global-batch-size {batch} "
            "can be divided"
        )
    return ValueError(
        f"no configuration fits {question.memory_limit:.3g} GiB a device; the fullest rank of the leanest takes "
        f"{by_use(most)}; {_nearest(question)}"
    )


def by_use(memory: Memory) -> str:
    """The memory of a rank by its uses."""
    parts = ", ".join(f"{size / GIB:.1f} {name.replace('_', ' and ')}" for name, size in vars(memory).items() if size)
    return f"{memory.total / GIB:.1f} GiB: {parts}"


def _leanest(question: Question) -> Memory | None:
    """The fullest rank of the leanest configuration, with as much on its host as that holds; None without a layout."""
    smallest = replace(question, families=("1f1b",), micro_batches=(1,), segments=_NUMBERS)
    evenly = (
        next(cuts(setup, segments), None)
        for setup in sorted(setups(smallest), key=least_bytes)[:_LEANEST]
        for segments in numbers_of_segments(smallest, setup)
    )
    away = (_mostly_away(evenly_cut.setup, question.budget) for evenly_cut in evenly if evenly_cut is not None)
    fullest = (max(memory_in_flight(setup), key=lambda rank: rank.total) for setup in away)
    return min(fullest, key=lambda memory: memory.total, default=None)


def _mostly_away(setup: TrainingSetup, budget: MemoryBudget) -> TrainingSetup:
    """The set-up with as many sixteenths of its activations on the host as that has room for."""
    if not budget.host:
        return setup
    shares = (replace(setup, offloads=sixteenths / 16) for sixteenths in range(16, 0, -1))
    return next((moved for moved in shares if host_in_flight(moved) <= budget.host), setup)


def _nearest(question: Question) -> str:
    """More devices, and shorter sequences, by doubling and halving."""
    counts = (question.num_devices << doubling for doubling in range(1, _DOUBLINGS))
    halved = (question.sequence_length >> halving for halving in range(1, _DOUBLINGS))
    lengths = takewhile(lambda length: length >= _SHORTEST, halved)
    more = (f"--gpus {count}" for count in counts if _has_plan(replace(question, num_devices=count)))
    shorter = (f"--seq-length {length}" for length in lengths if _has_plan(replace(question, sequence_length=length)))
    found = [*islice(more, 1), *islice(shorter, 1)]
    return f"it would with {' or with '.join(found)}" if found else "take a smaller model"


def _has_plan(question: Question) -> bool:
    most = _leanest(question)
    return most is not None and most.total <= GIB * question.memory_limit
