"""ZB-H1 and, with several segments, Seq1F1B with zero bubble."""

from ..clock import Clock
from ..schedule import Shape
from .one_f_one_b import one_f_one_b


def zb_h1(shape: Shape) -> Clock:
    """1F1B with the weight gradients late (arXiv 2401.10241, section 2.3).

    Rank r keeps r weight gradients back. In 1F1B it holds r units fewer than rank 0, so the peak
    over all ranks stays that of 1F1B. With V-shaped chunks all ranks hold equally many: there each
    W follows its I at once, and the peak stays the same too.
    """
    return one_f_one_b(shape).split(lag=lambda rank: 0 if shape.placement.turns else rank)
