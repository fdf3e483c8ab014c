"""The exchange of a context-parallel group around attention or a recurrence. Seconds, bytes.

Ranks exchange whole sequences as in Transformer Engine (attention/dot_product_attention/context_parallel.py), by the
values of --cp-comm-type; attention hides only a ring:

- `a2a`: tokens for heads before attention, heads for tokens after it.
- `all_gather`: keys and values are gathered in both directions, and their gradients reduced.
- `p2p`: keys and values, in the backward with their gradients, travel around a ring, one hop beside each step of
  attention. Each step adds its results to those before.
- `a2a+p2p a r`: heads among a neighbours, a ring of r of their groups.

Ranks share the heads of segments, so that earlier keys never travel again (model/attention/head_exchange.py).

Tested in costs/test_layer_times.py.
"""

from functools import lru_cache
from math import gcd, lcm
from typing import NamedTuple

from .blocks import BYTES, Attention, Block
from .machine import Group, Machine
from .training_setup import TrainingSetup


class BothPasses(NamedTuple):
    """Seconds of one thing in the forward and in the backward."""

    forward: float
    backward: float


def context_exchange(
    setup: TrainingSetup, machine: Machine, block: Block, length: int, attention: BothPasses
) -> BothPasses:
    """The exchange around a block for segments of `length` tokens, less what `attention`, the seconds of the block's
    attention, hides. Whole sequences take the fastest way if `cp_comm_type` gives none."""
    if setup.context_parallel == 1 or not (block.exchanged or block.attention):
        return BothPasses(0.0, 0.0)
    if block.attention is None:
        return _exchange_of_heads(setup, machine, length, block.exchanged)
    if len(setup.segments) > 1:
        return _exchange_of_heads(setup, machine, length, _numbers_of_token(setup, block.attention))
    ways = (setup.cp_comm_type,) if setup.cp_comm_type else comm_types(setup, machine)
    return min((_whole_sequences(setup, machine, block.attention, way, attention) for way in ways), key=sum)


def _exchange_of_heads(setup: TrainingSetup, machine: Machine, length: int, numbers: float) -> BothPasses:
    """An all-to-all of so many numbers for each token, alike in both directions."""
    exchanged = machine.all_to_all_time(setup.context_group, BYTES * setup.rows(length) * numbers)
    return BothPasses(exchanged, exchanged)


def _numbers_of_token(setup: TrainingSetup, attention: Attention) -> float:
    """What a rank exchanges of each token of a segment, with the part that it keeps. Ranks share the heads, and the
    queries of a head if there are more ranks than heads."""
    size = setup.context_parallel
    heads = max(1, int(attention.heads))
    kv_heads = int(attention.kv_heads)
    row_size = gcd(size, heads)  # the ranks that share the heads, see model/attention/head_exchange.py
    sent_kv_heads = lcm(kv_heads, row_size)  # with those that go to several ranks
    mean_dim = (attention.score_dim + attention.value_dim) / 2
    # Queries and outputs travel within a row, keys and values to all other ranks.
    sent = mean_dim * (2 * heads * (row_size - 1) + 2 * sent_kv_heads * (size - 1)) / row_size
    return sent * size / (size - 1)


@lru_cache(maxsize=4096)
def comm_types(setup: TrainingSetup, machine: Machine) -> tuple[str, ...]:
    """The ways of Transformer Engine for whole sequences; windows allow no ring."""
    size = setup.context_parallel
    model = setup.model
    kv_heads = model.num_heads if model.latent else model.num_kv_heads or model.num_heads
    shared = gcd(model.num_heads // setup.tensor_parallel, max(1, kv_heads // setup.tensor_parallel))
    ways = ["all_gather"]
    if shared % size == 0:
        ways.append("a2a")
    if not model.window_layers:
        ways.append("p2p")
        inner = gcd(size, shared, setup.context_group.in_node(machine))
        if 1 < inner < size:
            ways.append(f"a2a+p2p {inner} {size // inner}")
    return tuple(ways)


def comm_type_of_segments(setup: TrainingSetup) -> str:
    """The `cp_comm_type` of segments: training accepts `a2a` only if the ranks divide the heads."""
    ranks = setup.tensor_parallel * setup.context_parallel
    return "a2a" if setup.model.num_heads % ranks == 0 else "all_gather"


def _whole_sequences(
    setup: TrainingSetup, machine: Machine, attention: Attention, way: str, seconds: BothPasses
) -> BothPasses:
    """The exchange around an attention layer that takes these seconds, in one of the ways of `comm_types`."""
    size = setup.context_parallel
    rows = BYTES * setup.rows(setup.sequence_length)
    keys_values = rows * attention.keys_values
    if way == "all_gather":
        gathered = machine.all_gather_time(setup.context_group, size * keys_values)
        return BothPasses(gathered, 2 * gathered)
    neighbours, steps = _neighbours_and_steps(way, size)
    queries = rows * attention.heads * attention.score_dim
    output = rows * attention.heads * attention.value_dim
    exchanged = machine.all_to_all_time(Group(neighbours, setup.tensor_parallel), queries + keys_values + output)
    if steps == 1:
        return BothPasses(exchanged, exchanged)
    device = machine.device
    ring = Group(steps, neighbours * setup.tensor_parallel)
    hop = _hop_time(machine, ring, keys_values)
    hop_with_gradients = _hop_time(machine, ring, 2 * keys_values)
    # Each step of attention hides a hop, and adds its results to those before: two reads and a write.
    attention_forward = seconds.forward / steps
    attention_backward = seconds.backward / steps
    forward = exchanged + (steps - 1) * max(0.0, hop - attention_forward)
    forward += device.moving_time(3 * steps * output, 2 * steps)
    # The first hop of the backward has no gradients; the last has only these, and runs beside nothing.
    first = max(0.0, hop - attention_backward)
    inner = (steps - 2) * max(0.0, hop_with_gradients - attention_backward)
    backward = exchanged + (first + inner + hop)
    backward += device.moving_time(3 * steps * (queries + keys_values), 2 * steps)
    return BothPasses(forward, backward)


def _neighbours_and_steps(way: str, size: int) -> tuple[int, int]:
    """How many of the `size` ranks exchange heads among themselves, and how many groups of them form a ring."""
    kind, *sizes = way.split()
    if sizes:
        neighbours, steps = sizes
        return int(neighbours), int(steps)
    return (size, 1) if kind == "a2a" else (1, size)


def _hop_time(machine: Machine, ring: Group, size: float) -> float:
    """A message of so many bytes to the next rank of a ring. All neighbours send at once, to another node one rank of
    each ring."""
    in_node = ring.in_node(machine)
    target = ring.stride if in_node == ring.size else machine.devices_per_node
    return machine.message_time(0, target, size, machine.devices_per_node // in_node)
