"""Why a question has no plan, and the nearest that has."""

from dataclasses import replace

from ...errors import ParameterError
from ..costs.machine import GIB
from ..costs.step_memory import Memory
from .search import least_bytes, memory_in_flight, plan
from .space import Question, cuts, layouts, schedules, setups

_DOUBLINGS = 12
# Of the set-ups that need least, so many are looked at in full.
_LEANEST = 20
_NUMBERS = (1, 8, 64)  # of segments


def way_out(question: Question) -> ParameterError:
    """The error for a question without a plan: no layout, or none that fits, with what fills the fullest rank."""
    model = question.model
    if not any(True for _ in layouts(question)):
        return ParameterError(
            "no layout of {0} devices divides a batch of {1} sequences, {2} layers and {3} heads; "
            f"{{global_batch_size:{_next_batch(question)}}} can be divided",
            question.num_devices,
            question.global_batch_size,
            model.num_layers,
            model.num_kv_heads or model.num_heads,
        )
    most = _leanest(question)
    parts = ", ".join(f"{size / GIB:.1f} {name.replace('_', ' and ')}" for name, size in vars(most).items() if size)
    return ParameterError(
        f"no configuration fits {{0:.0f}} GiB a device; the leanest takes {{1:.1f}} GiB: {parts}; {_nearest(question)}",
        question.memory_limit,
        most.total / GIB,
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
    """More devices, and shorter sequences, by doubling and halving; in the form of a ParameterError's sentence."""
    found = []
    lean = replace(question, families=("1f1b",), strategies=("even",), micro_batches=(1,), segments=_NUMBERS)
    for doubling in range(1, _DOUBLINGS):
        devices = question.num_devices << doubling
        batch = max(question.global_batch_size, 1)
        if plan(replace(lean, num_devices=devices, global_batch_size=batch), best=1):
            found.append(f"{{num_devices:{devices}}}")
            break
    for halving in range(1, _DOUBLINGS):
        length = question.sequence_length >> halving
        if length >= 1024 and plan(replace(lean, sequence_length=length), best=1):
            found.append(f"{{sequence_length:{length}}}")
            break
    return f"it would with {' or with '.join(found)}" if found else "take a smaller model"
