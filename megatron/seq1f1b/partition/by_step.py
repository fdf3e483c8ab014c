"""Segments by the step that they make.

A step of few units fills and drains the pipeline for most of its time. A rank waits for the first segment of the ranks
before it, and the ranks after it wait for its last segment, so the first and last are better short and the middle long.
Two numbers describe such a cut: how much longer the middle is, and how much longer the end is than the start.
"""

from collections.abc import Callable, Sequence
from math import cos, pi

_WIDTHS = (0.4, 0.2, 0.1)  # of the steps from one cut to the next
_LEAST = 0.05  # of a segment, relative to the mean


def shortest_step(
    best: tuple[int, ...],
    cut: Callable[[Sequence[float]], tuple[int, ...]],
    seconds: Callable[[tuple[int, ...]], float],
    trials: int,
) -> tuple[int, ...]:
    """The lengths with the shortest step among `trials` cuts around `best`, which has equal times.

    `cut` takes the times that segments should have, in proportion; `seconds` gives the step of such a cut. The result
    is the same on every rank.
    """
    middle = end = 0.0
    least = seconds(best)
    for width in _WIDTHS:
        is_better = True
        while is_better:
            is_better = False
            for more, later in ((width, 0.0), (-width, 0.0), (0.0, width), (0.0, -width)):
                if trials == 0:
                    return best
                trials -= 1
                lengths = cut(_weights(middle + more, end + later, len(best)))
                if (found := seconds(lengths)) < least:
                    best, least, middle, end, is_better = lengths, found, middle + more, end + later, True
                    break
    return best


def _weights(middle: float, end: float, num_segments: int) -> list[float]:
    places = ((number + 0.5) / num_segments for number in range(num_segments))
    return [max(_LEAST, 1 - middle * cos(2 * pi * place) + end * (2 * place - 1)) for place in places]
