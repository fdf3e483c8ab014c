"""The table of features that our schedules do not support, checked at start-up, and written into docs/compatibility.md
by tools/compatibility.py.

Tested in arguments/test_unsupported.py.
"""

from collections.abc import Collection, Iterator, Mapping

from .attention import ATTENTION
from .batches import BATCHES
from .conditions import Settings
from .experts import EXPERTS
from .layers import LAYERS
from .logs import LOGS
from .memory import MEMORY
from .parallelism import PARALLELISM
from .precision import PRECISION
from .row import OurFeature, Unsupported
from .schedules import SCHEDULES
from .training_state import TRAINING_STATE

_ROWS = (
    *SCHEDULES,
    *BATCHES,
    *PARALLELISM,
    *ATTENTION,
    *LAYERS,
    *EXPERTS,
    *PRECISION,
    *MEMORY,
    *TRAINING_STATE,
    *LOGS,
)

UNSUPPORTED: Mapping[OurFeature, tuple[Unsupported, ...]] = {
    ours: tuple(row for row in _ROWS if row.excluded_by is ours) for ours in OurFeature
}


def unsupported(settings: Settings, uses: Collection[OurFeature]) -> Iterator[Unsupported]:
    """The features in `settings` that do not go with these uses."""
    for use in OurFeature:  # in the order of the table, whatever that of `uses`
        if use in uses:
            yield from (row for row in UNSUPPORTED[use] if row.holds(settings))


def first_unsupported(settings: Settings, uses: Collection[OurFeature]) -> str | None:
    """One sentence, without its full stop, on the first feature that is not supported; None if all are."""
    row = next(unsupported(settings, uses), None)
    return None if row is None else row.sentence
