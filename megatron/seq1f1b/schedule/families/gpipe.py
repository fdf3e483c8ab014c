"""GPipe and, with several segments, TeraPipe."""

from ..clock import Clock, grouped, smallest_group, straight
from ..schedule import Shape


def gpipe(shape: Shape) -> Clock:
    """All forwards, then all backwards (arXiv 1811.06965; with segments arXiv 2102.07988).

    Several looped chunks take turns after k * ceil(P / k) units, as in interleaved 1F1B.
    """
    tick = straight(shape) if shape.placement.turns else grouped(shape, smallest_group(shape))
    return Clock(shape, tick, turn=tick(shape.num_units - 1, shape.num_stages - 1) + 1)
