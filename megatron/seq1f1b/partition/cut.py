"""The named strategies, and the one function that everybody calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .balanced import balanced, segment_costs
from .cost import StageCost, analytic_costs, slowest
from .documents import balanced_by_documents
from .errors import SplitError
from .even import even
from .model_shape import ModelShape
from .rates import A100
from .terapipe import terapipe
from .uniform_comp import uniform_comp


@dataclass(frozen=True)
class Cut:
    """What is to be cut, and what a strategy may look at.

    `costs` are those of a segment on each stage. Kernels are at full speed for `full_speed_rows` tokens and more;
    `num_microbatches` sequences follow one another in a step. `documents` are those of one micro-batch.
    """

    sequence_length: int
    num_segments: int
    multiple_of: int
    model: ModelShape | None
    costs: Sequence[StageCost]
    full_speed_rows: int
    num_microbatches: int
    documents: Sequence[Sequence[int]] | None


def _even(cut: Cut) -> tuple[int, ...]:
    return even(cut.sequence_length, cut.num_segments, cut.multiple_of)


def _uniform_comp(cut: Cut) -> tuple[int, ...]:
    return uniform_comp(cut.sequence_length, cut.num_segments, cut.model, cut.multiple_of)


def _balanced(cut: Cut) -> tuple[int, ...]:
    cost = slowest(cut.costs)
    if cut.documents is not None:
        return balanced_by_documents(cut.sequence_length, cut.num_segments, cost, cut.documents, cut.multiple_of)
    # Where the kernels are slower for short segments, the cost jumps as a segment shrinks, and equal costs may not
    # exist; it can then be better to keep every segment long enough, or worse.
    options = [
        balanced(cut.sequence_length, cut.num_segments, cost, cut.multiple_of, min_length)
        for min_length in (1, cut.full_speed_rows)
    ]
    return min(options, key=lambda lengths: max(segment_costs(lengths, cost)))


def _terapipe(cut: Cut) -> tuple[int, ...]:
    return terapipe(
        cut.sequence_length,
        slowest(cut.costs),
        num_stages=len(cut.costs),
        num_segments=cut.num_segments,
        multiple_of=cut.multiple_of,
        num_microbatches=cut.num_microbatches,
    )


# `profile` is `balanced` on measured costs; whoever asks for it brings them.
STRATEGIES: dict[str, Callable[[Cut], tuple[int, ...]]] = {
    "even": _even,
    "uniform_comp": _uniform_comp,
    "balanced": _balanced,
    "terapipe": _terapipe,
    "profile": _balanced,
}

# Those that look at `costs`.
STRATEGIES_BY_COST = ("balanced", "terapipe", "profile")

# Those that look at `documents`.
STRATEGIES_BY_DOCUMENTS = ("balanced", "profile")


def cut_sequence(
    strategy: str,
    sequence_length: int,
    num_segments: int,
    multiple_of: int,
    model: ModelShape | None,
    costs: Sequence[StageCost] | None = None,
    full_speed_rows: int = 1,
    num_microbatches: int = 1,
    documents: Sequence[Sequence[int]] | None = None,
) -> tuple[int, ...]:
    """Lengths in tokens of the `num_segments` segments of a sequence, first to last.

    `documents` holds, for each sequence of a micro-batch, the positions that documents start at; only the strategies of
    STRATEGIES_BY_DOCUMENTS look at them. Without `costs` the model is taken for one stage on an A100; `even` does
    without the model. Raises SplitError for an unknown strategy, for fewer than one segment, for a model that is needed
    and missing, for `profile` without costs, and for a cut that would leave a segment empty.
    """
    if strategy not in STRATEGIES:
        raise SplitError(f"--sequence-split-strategy {strategy} is unknown; choose one of {', '.join(STRATEGIES)}")
    if num_segments < 1:
        raise SplitError(f"--sequence-splits {num_segments} must be at least 1")
    if model is None and strategy != "even":
        raise SplitError(
            f"--sequence-split-strategy {strategy} needs the sizes of a transformer, which this model does not tell; "
            "use even, or --sequence-split-file"
        )
    if costs is None:
        if strategy == "profile":
            raise SplitError(
                "--sequence-split-strategy profile needs --sequence-split-profile; measure one with "
                "tools/profile_segments.py, or use --sequence-split-strategy balanced"
            )
        costs = analytic_costs(model, [model.num_layers], A100) if strategy in STRATEGIES_BY_COST else ()
    return STRATEGIES[strategy](
        Cut(sequence_length, num_segments, multiple_of, model, costs, full_speed_rows, num_microbatches, documents)
    )
