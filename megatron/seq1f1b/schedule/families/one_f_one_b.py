"""1F1B and, with several segments, Seq1F1B."""

from ..action import Action
from ..clock import by_clock
from ..schedule import Shape


def one_f_one_b(shape: Shape, rank: int) -> list[Action]:
    """One forward, one backward (arXiv 2104.04473, section 2.2; with segments arXiv 2406.03488).

    In a clock of one tick per action a forward starts every second tick, one tick later on each
    rank, and the backward of a micro-batch starts right after its last segment has gone forward
    at the last stage. So rank r runs min(P - r - 2 + k, m * k) forwards before its first pair of
    one forward and one backward.

    P = 3, m = 2, k = 2, F and B of (micro-batch, segment):

        rank 0: F00 F01 F10 F11 B01 B00 B11 B10
        rank 1: F00 F01 F10 B01 F11 B00 B11 B10
        rank 2: F00 F01 B01 F10 B00 F11 B11 B10
    """

    if shape.num_chunks != 1:
        raise ValueError("1f1b with several model chunks is not built yet")

    def tick(unit: int, stage: int) -> int:
        return 2 * unit + stage

    turn = tick(shape.num_segments - 1, shape.num_stages - 1) + 1
    return by_clock(shape, rank, tick, turn)
