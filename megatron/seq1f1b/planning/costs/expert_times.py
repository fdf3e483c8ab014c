"""How long the routed experts of a layer take for one segment. Seconds.

Every rank of an expert-parallel group holds an equal part of the experts, each whole (--expert-tensor-parallel-size 1),
and routes the tokens that sequence parallelism leaves it. Tokens are taken to spread evenly over the experts.
"""

from dataclasses import dataclass

from .collectives import all_to_all_time
from .kernels import BYTES, matmul_time, moving_time
from .machine import Machine
from .training_setup import TrainingSetup


@dataclass(frozen=True)
class ExpertTime:
    """`matmul` and `all_to_all` of the forward, which the input gradients take again, and `other` of the forward."""

    matmul: float
    other: float
    all_to_all: float
    weight: float


NO_EXPERTS = ExpertTime(0.0, 0.0, 0.0, 0.0)


def expert_time(setup: TrainingSetup, machine: Machine, rows: float) -> ExpertTime:
    """The time of `rows` tokens of a tensor-parallel group."""
    model, experts, device = setup.model, setup.model.experts, machine.device
    assert experts is not None, "a layer of experts without experts"
    hidden, ffn = model.hidden_size, experts.ffn_hidden_size
    fc1 = ffn * (2 if model.is_gated else 1)
    tokens = rows / setup.tensor_parallel
    routed = tokens * experts.active
    here = experts.total / setup.expert_parallel
    # Each expert has its part of what the ranks of the group send: one grouped product.
    weights = ((fc1, hidden), (hidden, ffn))  # outputs, inputs
    matmul = sum(matmul_time(device, routed / here, out, into, here) for out, into in weights)
    weight = sum(matmul_time(device, out, into, routed / here, here) for out, into in weights)
    adding = moving_time(device, 2 * setup.software.gradient_bytes * setup.layer_expert_parameters)
    # The router; sorting tokens by expert and back, each a read and a write; the activation function.
    router = matmul_time(device, tokens, experts.total, hidden)
    other = moving_time(device, BYTES * routed * (4 * hidden + fc1 + ffn), 12)
    # Tokens go to their experts and come back.
    exchanged = 2 * all_to_all_time(machine, setup.expert_group, BYTES * routed * hidden)
    return ExpertTime(matmul + router, other, exchanged, max(weight, adding) + router)
