"""Why a question has no plan, and the nearest question that has one.

Tested in planner/test_search.py.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from ..costs.machine import GIB
from ..costs.step_memory import Memory
from ..costs.training_setup import TrainingSetup
from .fitting import host_in_flight, memory_in_flight
from .memory_bounds import least_bytes
from .search import Search
from .space import MemoryBudget, Question, cuts, numbers_of_segments, setups

_DOUBLINGS = 12  # less one is the most often that devices are doubled or sequences halved
_LEANEST = 20  # set-ups of least memory that are predicted in full
_NUMBERS = (1, 8, 64)  # of segments
_SHORTEST = 1024  # tokens of a halved sequence


def way_out(question: Question, left_out: Sequence[str] = ()) -> ValueError:
    """The error for a question without a plan: no layout, or none that fits, with the uses of the fullest rank. The
    sentences `left_out` name features that its flags exclude: the answer where a plan with these would fit."""
    model = question.model
    if left_out and Search(replace(question, accepts=lambda candidate: True)).best(1, exact_below=0.0):
        return ValueError(
            f"a plan that fits {question.memory_limit:.3g} GiB a device needs what the flags of the launch exclude; "
            f"drop one of these. {' '.join(left_out)}"
        )
    most = _leanest(question)
    if most is None:
        batch = ceil(question.global_batch_size / question.num_devices) * question.num_devices
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
    smallest = replace(question, families=("1f1b",), chunks=(1,), micro_batches=(1,), segments=_NUMBERS)
    fullest_ranks = []
    for whole in sorted(setups(smallest), key=least_bytes)[:_LEANEST]:
        for segments in numbers_of_segments(smallest, whole):
            evenly_cut = next(cuts(whole, segments), None)
            if evenly_cut is not None:
                moved = _mostly_on_host(evenly_cut.setup, question.budget)
                fullest_ranks.append(max(memory_in_flight(moved), key=lambda rank: rank.total))
    return min(fullest_ranks, key=lambda memory: memory.total, default=None)


def _mostly_on_host(setup: TrainingSetup, budget: MemoryBudget) -> TrainingSetup:
    """The set-up with as many sixteenths of its activations on the host as that has room for."""
    if not budget.host:
        return setup

    def overflows(sixteenths: int) -> bool:
        return host_in_flight(replace(setup, offloads=sixteenths / 16)) > budget.host

    first_too_many = bisect_left(range(1, 17), True, key=overflows) + 1
    return replace(setup, offloads=(first_too_many - 1) / 16) if first_too_many > 1 else setup


def _nearest(question: Question) -> str:
    """What would make a configuration fit: the devices doubled, or the sequences halved, as often as it takes."""
    changes = []
    for doubling in range(1, _DOUBLINGS):
        count = question.num_devices * 2**doubling
        if _has_plan(replace(question, num_devices=count)):
            changes.append(f"--gpus {count}")
            break
    for halving in range(1, _DOUBLINGS):
        length = question.sequence_length // 2**halving
        if length < _SHORTEST:
            break
        if _has_plan(replace(question, sequence_length=length)):
            changes.append(f"--seq-length {length}")
            break
    return f"it would with {' or with '.join(changes)}" if changes else "take a smaller model"


def _has_plan(question: Question) -> bool:
    most = _leanest(question)
    return most is not None and most.total <= GIB * question.memory_limit
