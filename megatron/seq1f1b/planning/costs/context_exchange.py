"""The time that context parallelism exchanges around a layer, without what attention hides. Seconds.

Whole sequences are exchanged as in Transformer Engine (attention/dot_product_attention/context_parallel.py), by the
values of --cp-comm-type:

- `a2a`: tokens for heads before attention, heads for tokens after it; nothing hides it.
- `all_gather`: keys and values are gathered in both directions, and their gradients reduced; nothing hides it.
- `p2p`: keys and values, in the backward with their gradients, travel around a ring, one hop beside each step of
  attention. Each step adds its results to those before.
- `a2a+p2p a r`: heads among a neighbours, a ring of r of their groups.

Ranks share the heads of segments, so that earlier keys never travel again (model/head_exchange).
"""

from functools import lru_cache
from math import gcd, lcm

from .blocks import BYTES, Attention, Block
from .machine import Machine
from .operations import Group, all_gather_time, all_to_all_time, message_time, moving_time
from .training_setup import TrainingSetup


def context_exchange(
    setup: TrainingSetup, machine: Machine, block: Block, length: int, attention: tuple[float, float]
) -> tuple[float, float]:
    """Forward and backward for segments of `length` tokens, around a block whose attention takes the seconds in
    `attention`. Whole sequences take the fastest way if `cp_comm_type` gives none."""
    if setup.context_parallel == 1 or not (block.exchanged or block.attention):
        return 0.0, 0.0
    if block.attention and len(setup.segments) == 1:
        ways = (setup.cp_comm_type,) if setup.cp_comm_type else comm_types(setup, machine)
        return min((_whole(setup, machine, block.attention, way, attention) for way in ways), key=sum)
    numbers = _of_segments(setup, block.attention) if block.attention else block.exchanged
    seconds = all_to_all_time(machine, setup.context_group, BYTES * setup.rows(length) * numbers)
    return seconds, seconds


@lru_cache(maxsize=4096)
def comm_types(setup: TrainingSetup, machine: Machine) -> tuple[str, ...]:
    """The ways of Transformer Engine for whole sequences; windows allow no ring."""
    size, model = setup.context_parallel, setup.model
    kv_heads = model.num_heads if model.latent else model.num_kv_heads or model.num_heads
    shared = gcd(model.num_heads // setup.tensor_parallel, max(1, kv_heads // setup.tensor_parallel))
    ways = ["all_gather"] + ["a2a"] * (shared % size == 0)
    if not model.window_layers:
        inner = gcd(size, shared, setup.context_group.in_node(machine))
        ways += ["p2p"] + [f"a2a+p2p {inner} {size // inner}"] * (1 < inner < size)
    return tuple(ways)


def comm_type_of_segments(setup: TrainingSetup) -> str:
    """The `cp_comm_type` of segments: training accepts `a2a` only if the ranks divide the heads."""
    ranks = setup.tensor_parallel * setup.context_parallel
    return "a2a" if setup.model.num_heads % ranks == 0 else "all_gather"


def _of_segments(setup: TrainingSetup, attention: Attention) -> float:
    """Numbers of a token that context-parallel ranks exchange around attention, with the part that a rank keeps. Ranks
    share the heads, and the queries of a head if there are more ranks than heads."""
    size, heads, kv_heads = setup.context_parallel, max(1, int(attention.heads)), int(attention.kv_heads)
    row = gcd(size, heads)
    queries = 2 * heads * (row - 1)
    keys_values = 2 * lcm(kv_heads, row) * (size - 1)
    sent = (attention.score_dim + attention.value_dim) / 2 * (queries + keys_values) / row
    return sent * size / (size - 1)


def _whole(
    setup: TrainingSetup, machine: Machine, attention: Attention, way: str, seconds: tuple[float, float]
) -> tuple[float, float]:
    """`seconds` are those of attention, forward and backward."""
    kind, *sizes = way.split()
    size = setup.context_parallel
    shared, steps = map(int, sizes) if sizes else (size, 1) if kind == "a2a" else (1, size)
    rows = BYTES * setup.rows(setup.sequence_length)
    keys_values = rows * attention.keys_values
    queries = rows * attention.heads * attention.score_dim
    output = rows * attention.heads * attention.value_dim
    if kind == "all_gather":
        gathered = all_gather_time(machine, setup.context_group, size * keys_values)
        return gathered, 2 * gathered
    heads = Group(shared, setup.tensor_parallel)
    exchanged = all_to_all_time(machine, heads, queries + keys_values + output)
    if steps == 1:
        return exchanged, exchanged
    # All ring neighbours send at once, to another node one rank of each ring.
    ring = Group(steps, shared * setup.tensor_parallel)
    here = ring.in_node(machine)
    there = ring.stride if here == steps else machine.devices_per_node
    senders = machine.devices_per_node // here
    hop, both = (message_time(machine, 0, there, size, senders) for size in (keys_values, 2 * keys_values))
    forward, back = (each / steps for each in seconds)
    added = output, queries + keys_values
    summed, of_gradients = (moving_time(machine.device, 3 * steps * size, 2 * steps) for size in added)
    # The first hop of the backward has no gradients; the last has only these, and runs beside nothing.
    hops = max(0.0, hop - back) + (steps - 2) * max(0.0, both - back) + hop
    return exchanged + (steps - 1) * max(0.0, hop - forward) + summed, exchanged + hops + of_gradients
