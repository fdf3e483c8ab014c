"""Where nothing fits: why, and the nearest that does."""

from dataclasses import replace

from ..costs.memory import GIB
from .bounds import least_bytes
from .question import Question
from .search import plan
from .space import candidates, layouts

_DOUBLINGS = 12


def way_out(question: Question) -> str:
    """One sentence without its full stop, for a question without a plan."""
    model = question.model
    if not any(True for _ in layouts(question)) or not any(True for _ in candidates(question)):
        batch = _next_batch(question)
        return (
            f"no layout of {question.num_devices} devices divides a batch of {question.global_batch_size} sequences, "
            f"{model.num_layers} layers and {model.num_kv_heads or model.num_heads} heads; "
            f"--global-batch-size {batch} can be divided"
        )
    least = min(least_bytes(each.setup) for each in candidates(question)) / GIB
    why = (
        f"no configuration fits {question.memory_limit:.0f} GiB a device: the leanest takes at least {least:.0f} GiB, "
        "for weights, gradients, optimizer state and one micro-batch"
        if least > question.memory_limit
        else f"no configuration fits {question.memory_limit:.0f} GiB a device with the activations in flight"
    )
    return f"{why}; {_nearest(question)}"


def _next_batch(question: Question) -> int:
    return -(-question.global_batch_size // question.num_devices) * question.num_devices


def _nearest(question: Question) -> str:
    """More devices, and shorter sequences, by doubling and halving."""
    found = []
    lean = replace(question, families=("1f1b",), strategies=("even",), recomputes=("full", "none"), micro_batches=(1,))
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
