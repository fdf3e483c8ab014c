"""Where nothing fits: why, and the nearest that does."""

from dataclasses import replace

from ...errors import ParameterError
from ..costs.memory import GIB
from .bounds import least_bytes
from .question import Question
from .search import plan
from .space import setups

_DOUBLINGS = 12


def way_out(question: Question) -> ParameterError:
    """The error for a question without a plan."""
    model = question.model
    if not any(True for _ in setups(question)):
        return ParameterError(
            "no layout of {0} devices divides a batch of {1} sequences, {2} layers and {3} heads; "
            f"{{global_batch_size:{_next_batch(question)}}} can be divided",
            question.num_devices,
            question.global_batch_size,
            model.num_layers,
            model.num_kv_heads or model.num_heads,
        )
    least = min(map(least_bytes, setups(question))) / GIB
    why = (
        f"the leanest takes at least {least:.0f} GiB, for weights, gradients, optimizer state and one micro-batch"
        if least > question.memory_limit
        else "the leanest has too many activations in flight"
    )
    return ParameterError(
        f"no configuration fits {{0:.0f}} GiB a device: {{1}}; {_nearest(question)}", question.memory_limit, why
    )


def _next_batch(question: Question) -> int:
    return -(-question.global_batch_size // question.num_devices) * question.num_devices


def _nearest(question: Question) -> str:
    """More devices, and shorter sequences, by doubling and halving; in the form of a ParameterError's sentence."""
    found = []
    lean = replace(question, families=("1f1b",), strategies=("even",), recomputes=("full", "none"), micro_batches=(1,))
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
