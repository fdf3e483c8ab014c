"""Segments of equal forward work: the computation-wise split of Seq1F1B (arXiv 2406.03488, section 3.4).

Token by token the causal attention grows with the prefix, so equal lengths mean unequal work. The authors count,
for a segment of x tokens that ends at position e,

    cost(x, e) = 4·x·h·V + L·(8·x·h·n·d + 4·x·h·f + (4·d + 3)·n·(x·e − x²/2))

with hidden size h, FFN size f, n heads of size d, padded vocabulary V and L layers, and give every segment one k-th of
the whole. This module reproduces their lengths exactly, flaws included: it is the split that their tables were
measured with.
"""

from math import sqrt

from .errors import SplitError
from .model_shape import ModelShape


def uniform_comp(
    sequence_length: int, num_segments: int, model: ModelShape, multiple_of: int = 1
) -> tuple[int, ...]:
    """Cut into segments of equal forward cost; lengths in tokens, first to last.

    The segments are solved from the last to the first, each rounded down to a multiple of `multiple_of`; the first
    takes what remains. Raises SplitError if rounding would leave an empty segment, or if the sequence is no multiple.
    """
    if sequence_length % multiple_of:
        raise SplitError(
            f"--seq-length {sequence_length} is not a multiple of {multiple_of}, the size that segments are "
            f"rounded to under --sequence-parallel; choose a multiple of {multiple_of}"
        )
    per_pair = model.num_layers * (4 * model.head_dim + 3) * model.num_heads
    projections = 8 * model.hidden_size * model.num_heads * model.head_dim
    feed_forward = 4 * model.hidden_size * model.ffn_hidden_size
    per_token = model.num_layers * (projections + feed_forward) + 4 * model.hidden_size * model.vocab_size

    # A segment of x tokens that ends at `end` costs (per_token + per_pair·end)·x − per_pair/2·x².
    quadratic = per_pair / 2
    target = (per_token * sequence_length + quadratic * sequence_length**2) / num_segments
    lengths: list[int] = []
    end = sequence_length
    for _ in range(num_segments - 1):
        linear = per_token + per_pair * end
        discriminant = linear**2 - 4 * quadratic * target
        # Rounding earlier segments down can leave more than the rest can hold only in degenerate cases.
        root = (linear - sqrt(discriminant)) / (2 * quadratic) if discriminant >= 0 else end
        length = int(root) // multiple_of * multiple_of
        lengths.append(length)
        end -= length
    lengths.append(end)
    if min(lengths) <= 0:
        raise SplitError(
            f"--sequence-splits {num_segments} with --sequence-split-strategy uniform_comp leaves an empty segment of "
            f"--seq-length {sequence_length}; use fewer segments or --sequence-split-strategy even"
        )
    return tuple(reversed(lengths))
