"""The named schedules: each is a function from the sizes of a pipeline to a clock."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from .clock import Clock, first_turn, grouped, smallest_group, straight
from .schedule import Shape


def gpipe(shape: Shape) -> Clock:
    """All forwards, then all backwards: GPipe (arXiv 1811.06965); with segments TeraPipe (arXiv 2102.07988).

    Several looped chunks take turns after k * ceil(P / k) units, as in interleaved 1F1B.
    """
    tick = straight(shape) if shape.placement.turns else grouped(shape, smallest_group(shape))
    return Clock(shape, tick, turn=tick(shape.num_units - 1, shape.num_stages - 1) + 1)


def one_f_one_b(shape: Shape, has_pairs: bool = False) -> Clock:
    """One forward, one backward: 1F1B, interleaved 1F1B (arXiv 2104.04473, section 2.2); with segments Seq1F1B and
    Seq1F1B-I (arXiv 2406.03488).

    Forwards and backwards of a rank have ticks of different parity, so they alternate as soon as both exist. At the
    last stage the first backward comes right after the last segment of the first micro-batch. So the warm-up follows:
    with one model chunk, min(P - r - 2 + k, m * k) forwards before the first pair of one forward and one backward. For
    P = 3, m = 2, k = 2, F and B of (micro-batch, segment):

        rank 0: F00 F01 F10 F11 B01 B00 B11 B10
        rank 1: F00 F01 F10 B01 F11 B00 B11 B10
        rank 2: F00 F01 B01 F10 B00 F11 B11 B10

    Looped chunks take turns after G = k * ceil(P / k) units; (C - 1) * G + 2 * (P - r - 1) + k - 1 forwards come before
    the first pair. A hop takes two ticks, as in Megatron's order. In a V every rank holds about as many activations as
    rank 0 of 1F1B with one chunk.

    If it `has_pairs`, each forward and backward that alternate run beside each other. A hop then takes two ticks
    whatever the number of chunks, and all backwards come one unit later, since the last stage would else pair a unit
    with itself. For P = 2, m = 3, k = 2:

        rank 0: F00 F01 F10 F11 F20|B01 F21|B00 B11 B10 B21 B20
        rank 1: F00 F01 F10|B01 F11|B00 F20|B11 F21|B10 B21 B20
    """
    if shape.num_chunks == 1:
        tick = straight(shape, period=2, hop=2 if has_pairs else 1)
    elif shape.placement.turns:
        tick = straight(shape, period=2, hop=2)
    else:
        tick = grouped(shape, smallest_group(shape), period=2, hop=2)
    turn = first_turn(shape, tick)
    if has_pairs:
        turn += 2
    return Clock(shape, tick, turn, has_pairs=has_pairs)


def zb_h1(shape: Shape, has_pairs: bool = False) -> Clock:
    """1F1B with delayed weight gradients: ZB-H1 (arXiv 2401.10241, section 2.3).

    Rank r delays W by r units, which it holds fewer than rank 0 in 1F1B, so the peak over all ranks stays that of 1F1B.
    In a V all ranks hold equally many, so each W follows its I at once.
    """
    return one_f_one_b(shape, has_pairs).split(lag=lambda rank: 0 if shape.placement.turns else rank)


def breadth_first(shape: Shape) -> Clock:
    """All units of a model chunk before the next chunk: the modular pipeline with layered gradient accumulation (arXiv
    2106.02679). A chunk's gradients are reduced, and its parameters gathered, while other chunks run."""
    units = shape.num_units
    fewest = smallest_group(shape)
    # In a V, the last rank to end a chunk is the first to start the next one.
    tick = grouped(shape, group=units + fewest if shape.placement.turns else max(units, fewest))
    return Clock(shape, tick, turn=tick(shape.num_units - 1, shape.num_stages - 1) + 1)


FAMILIES: Mapping[str, Callable[[Shape], Clock]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zb-h1": zb_h1,
        "breadth-first": breadth_first,
    }
)
"""The clock of each named schedule, by its name."""

PAIRED: Mapping[str, Callable[[Shape], Clock]] = MappingProxyType(
    {
        "1f1b": partial(one_f_one_b, has_pairs=True),
        "zb-h1": partial(zb_h1, has_pairs=True),
    }
)
"""The clocks with pairs, of the schedules in which forwards and backwards alternate."""


def clock_of(family: str, shape: Shape, has_pairs: bool) -> Clock:
    """The clock of a named schedule, with pairs or without."""
    return (PAIRED if has_pairs else FAMILIES)[family](shape)
