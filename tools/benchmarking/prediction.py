"""Steps predicted from what single actions took in other runs."""

import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random

from megatron.seq1f1b.costs.execution import execute_lowered
from megatron.seq1f1b.schedule import Costs, lower

from .profile import Profile
from .results import as_run
from .variants import Variant

_DRAWS = 100


def predicted_seconds(variant: Variant, profile: Profile, message_seconds: float) -> float:
    """The schedule of a variant, lowered, with messages of so many seconds: the mean of steps whose actions take what
    is drawn for them, from one round of the profile after the other."""
    lowered = lower(as_run(variant))
    costs = Costs.uniform(variant.shape, message=message_seconds)
    bounds = list(pairwise(accumulate(variant.lengths, initial=0)))
    actions = [span.action for rank in variant.spans[-1] for span in rank]
    generator = Random(0)
    steps = []
    for number in range(_DRAWS):
        round_ = number % len(profile.rounds)
        drawn = {action: profile.drawn(round_, action, *bounds[action.segment], generator) for action in actions}
        steps.append(execute_lowered(lowered, costs, drawn=drawn).makespan)
    return statistics.mean(steps)


def table(rows: Sequence[tuple[str, float, float]]) -> str:
    """Name, measured and predicted seconds of each configuration."""
    lines = [f"{'configuration':52}{'measured':>10}{'predicted':>11}{'error':>9}"]
    for name, measured, predicted in rows:
        lines.append(f"{name:52}{measured:10.3f}{predicted:11.3f}{100 * (predicted / measured - 1):+8.1f} %")
    errors = [abs(predicted / measured - 1) for _, measured, predicted in rows]
    lines.append(f"mean error {100 * sum(errors) / len(errors):.1f} %, worst {100 * max(errors):.1f} %")
    return "\n".join(lines)
