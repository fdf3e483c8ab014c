"""What single actions took in the runs of a profile: in the mean, and by chance in each round of these runs.

A step is as long as its longest path. Where paths of about equal length meet, as in 1F1B, chance delays of single
actions make it longer than means of actions would. Ranks share a machine: a slow round is slow on all of them, so all
actions of a simulated step are drawn from one round.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import log
from random import Random

from megatron.seq1f1b.costs.stage_costs import TimedSegment
from megatron.seq1f1b.schedule import Action, Kind, Shape, Span
from megatron.seq1f1b.schedule.dependencies import message_needed

from .measured_time import MeasuredTime, fit
from .variants import Variant

# The spans of one step, by rank.
Step = Sequence[Sequence[Span]]


@dataclass(frozen=True)
class Chances:
    """One step of a run: by kind and stage, how many times as long as in the mean of all steps its actions took, and
    the seconds from the end of an action to the start of the next that had nothing to wait for."""

    factors: Mapping[tuple[Kind, int], Sequence[float]]
    between: Sequence[float]


@dataclass(frozen=True)
class Profile:
    """`times` are means of what a segment takes on every stage, by kind. `rounds` have the steps of all runs that
    were timed in one turn, by the tokens of a segment of the run."""

    times: Mapping[Kind, tuple[MeasuredTime, ...]]
    rounds: Sequence[Mapping[float, Chances]]

    def drawn(self, round_: int, action: Action, start: int, end: int, generator: Random) -> float:
        """Seconds of an action on the tokens from `start` to `end`, with the time to the next one, as they may be in
        this round. Whole backwards take both halves where those were timed."""
        chances = self.rounds[round_]
        nearest = min(chances, key=lambda tokens: abs(log(tokens / (end - start))))
        chosen = chances[nearest]
        kinds = (action.kind,) if action.kind in self.times else (Kind.I, Kind.W)
        seconds = generator.choice(chosen.between)
        for kind in kinds:
            # A fitted time of next to nothing may come out below it.
            mean = max(0.0, self.times[kind][action.stage](start, end))
            seconds += mean * generator.choice(chosen.factors[kind, action.stage])
        return seconds


def profile_of(runs: Sequence[Variant]) -> Profile:
    """By the steps of runs with segments of another length each, timed in turn, whose backwards are all whole or all
    split."""
    means = [mean_seconds(run.spans) for run in runs]
    stages = range(runs[0].shape.num_stages)
    kinds = sorted({kind for kind, _, _ in means[0]})
    times = {kind: tuple(fit(list(_points(runs, means, kind, stage))) for stage in stages) for kind in kinds}
    rounds = []
    for steps in zip(*(run.spans for run in runs), strict=True):
        chances = {}
        for run, mean, step in zip(runs, means, steps, strict=True):
            tokens = sum(run.lengths) / len(run.lengths)
            chances[tokens] = Chances(_factors(step, mean), seconds_between(step, run.shape))
        rounds.append(chances)
    return Profile(times, rounds)


def mean_seconds(steps: Sequence[Step]) -> dict[tuple[Kind, int, int], float]:
    """Of all actions of a kind, stage and segment. Unlike a median it counts rare delays, of which a step has some."""
    seconds = defaultdict(list)
    for step in steps:
        for rank in step:
            for (kind, stage, _, segment), start, end in rank:
                seconds[kind, stage, segment].append(end - start)
    return {key: statistics.mean(values) for key, values in seconds.items()}


def seconds_between(step: Step, shape: Shape) -> list[float]:
    """What a rank takes from the end of an action to the start of the next one: to send, to post a receive, to let the
    threads of messages run. Only before actions that need no message, for others may have waited for theirs."""
    seconds = []
    for rank in step:
        for before, after in pairwise(rank):
            if message_needed(after.action, shape) is None:
                seconds.append(after.start - before.end)
    return seconds


def _factors(step: Step, means: Mapping[tuple[Kind, int, int], float]) -> dict[tuple[Kind, int], list[float]]:
    factors = defaultdict(list)
    for rank in step:
        for (kind, stage, _, segment), start, end in rank:
            factors[kind, stage].append((end - start) / means[kind, stage, segment])
    return dict(factors)


def _points(
    runs: Sequence[Variant], means: Sequence[Mapping[tuple[Kind, int, int], float]], kind: Kind, stage: int
) -> Iterator[TimedSegment]:
    for run, mean in zip(runs, means, strict=True):
        for segment, (start, end) in enumerate(pairwise(accumulate(run.lengths, initial=0))):
            yield TimedSegment(end - start, start, mean[kind, stage, segment])
