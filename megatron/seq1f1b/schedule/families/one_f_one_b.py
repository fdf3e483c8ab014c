"""1F1B, interleaved 1F1B and, with several segments, Seq1F1B and Seq1F1B-I."""

from ..clock import Clock, grouped, smallest_group, straight
from ..schedule import Shape


def one_f_one_b(shape: Shape) -> Clock:
    """One forward, one backward (arXiv 2104.04473, section 2.2; with segments arXiv 2406.03488).

    On a rank the ticks of forwards and of backwards differ in parity, so they alternate as soon as
    there are both. The first backward follows the last segment of the first micro-batch at the
    last stage, at once. That is all; how long a rank warms up follows from it.

    One model chunk: min(P - r - 2 + k, m * k) forwards before the first pair of one forward and
    one backward. For P = 3, m = 2, k = 2, F and B of (micro-batch, segment):

        rank 0: F00 F01 F10 F11 B01 B00 B11 B10
        rank 1: F00 F01 F10 B01 F11 B00 B11 B10
        rank 2: F00 F01 B01 F10 B00 F11 B11 B10

    Looped chunks (interleaved): chunks take turns after G = k * ceil(P / k) units, the fewest whole
    micro-batches that occupy all ranks; (C - 1) * G + 2 * (P - r - 1) + k - 1
    forwards before the first pair. A hop takes two ticks, as in Megatron's order.

    V-shaped chunks: a unit goes down and up without a pause, at two ticks a hop; every rank holds
    about as many activations as rank 0 of 1F1B with one chunk.
    """
    if shape.num_chunks == 1:
        tick = straight(shape, period=2, hop=1)
    elif shape.placement.turns:
        tick = straight(shape, period=2, hop=2)
    else:
        tick = grouped(shape, smallest_group(shape), period=2, hop=2)
    turn = tick(shape.num_segments - 1, shape.num_stages - 1) + 1
    return Clock(shape, tick, turn)
