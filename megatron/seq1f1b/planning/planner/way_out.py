"""Why a question has no plan, and the nearest that has."""

from dataclasses import replace

from ..costs.machine import GIB
from ..costs.step_memory import Memory
from .search import least_bytes, memory_in_flight, plan
from .space import Question, cuts, layouts, schedules, setups

_DOUBLINGS = 12
# Of the set-ups that need least, so many are looked at in full.
_LEANEST = 20
_NUMBERS = (1, 8, 64)  # of segments


def way_out(question: Question) -> ValueError:
    """The error for a question without a plan: no layout, or none that fits, with what fills the fullest rank."""
    model = question.model
    if not any(True for _ in layouts(question)):
        return ValueError(
            f"no layout of {question.num_devices} devices divides a batch of {question.global_batch_size} sequences, "
            f"{model.num_layers} layers and {model.num_kv_heads or model.num_heads} heads; --global-batch-size "
            f"{_next_batch(question)} can be divided"
        )
    most = _leanest(question)
    parts = ", ".join(f"{size / GIB:.1f} {name.replace('_', ' and ')}" for name, size in vars(most).items() if size)
    return ValueError(
        f"no configuration fits {question.memory_limit:.0f} GiB a device; the leanest takes {most.total / GIB:.1f} "
        f"GiB: {parts}; {_nearest(question)}"
    )


def _leanest(question: Question) -> Memory:
    """The memory of the fullest rank of the configuration that needs least."""
    lean, found = replace(question, families=("1f1b",), strategies=("even",), segments=_NUMBERS), []
    for setup in sorted(setups(lean), key=least_bytes)[:_LEANEST]:
        for family, segments in schedules(lean, setup):
            for each in cuts(lean, setup, family, segments):
                found.append(max(memory_in_flight(each.setup), key=lambda memory: memory.total))
    return min(found, key=lambda memory: memory.total)


def _next_batch(question: Question) -> int:
    return -(-question.global_batch_size // question.num_devices) * question.num_devices


def _nearest(question: Question) -> str:
    """More devices, and shorter sequences, by doubling and halving."""
    found = []
    lean = replace(question, families=("1f1b",), strategies=("even",), micro_batches=(1,), segments=_NUMBERS)
    for doubling in range(1, _DOUBLINGS):
        devices = question.num_devices << doubling
        batch = max(question.global_batch_size, 1)
        if plan(replace(lean, num_devices=devices, global_batch_size=batch), best=1):
            found.append(f"--gpus {devices}")
            break
    for halving in range(1, _DOUBLINGS):
        length = question.sequence_length >> halving
        if length >= 1024 and plan(replace(lean, sequence_length=length), best=1):
            found.append(f"--seq-length {length}")
            break
    return f"it would with {' or with '.join(found)}" if found else "take a smaller model"
