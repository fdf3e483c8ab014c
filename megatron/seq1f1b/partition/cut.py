"""The named strategies, and the one function that everybody calls."""

from .errors import SplitError
from .even import even
from .model_shape import ModelShape
from .uniform_comp import uniform_comp

STRATEGIES = {
    "even": lambda sequence_length, num_segments, multiple_of, model: even(sequence_length, num_segments, multiple_of),
    "uniform_comp": lambda sequence_length, num_segments, multiple_of, model: uniform_comp(
        sequence_length, num_segments, model, multiple_of
    ),
}


def cut_sequence(
    strategy: str, sequence_length: int, num_segments: int, multiple_of: int, model: ModelShape
) -> tuple[int, ...]:
    """Lengths in tokens of the `num_segments` segments of a sequence, first to last.

    Raises SplitError for an unknown strategy, for fewer than one segment, and for a cut that would leave one empty.
    """
    if strategy not in STRATEGIES:
        raise SplitError(f"--sequence-split-strategy {strategy} is unknown; choose one of {', '.join(STRATEGIES)}")
    if num_segments < 1:
        raise SplitError(f"--sequence-splits {num_segments} must be at least 1")
    return STRATEGIES[strategy](sequence_length, num_segments, multiple_of, model)
