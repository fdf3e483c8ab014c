"""The fastest configurations for sequences of unequal lengths, in units of at most so many tokens (--unit-tokens).

A few steps are drawn from a histogram of lengths and packed as in training. A search over steps of average units bounds
configurations; those that hold the longest sequence are bounded, and then predicted, by the drawn steps, every unit
with its own tokens and attention.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from heapq import heapify
from itertools import accumulate, chain
from math import ceil, inf, log2
from operator import attrgetter
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from ..costs.blocks import pairs, paper_flops
from ..costs.simulator import Prediction, predict
from ..costs.step_memory import memory_of_order
from ..costs.training_setup import TrainingSetup
from ..partition import packs_of_step, segment_multiple, work_by_flops
from ..schedule import FAMILIES
from . import moved_layers
from . import search_items as items
from .fitting import fullest_ranks
from .memory_bounds import least_bytes
from .packed_bounds import PackedBounds, packed_bounds
from .packed_steps import Order, PackedSteps, Steps, packed_steps
from .search import Plan, Search
from .search_order import WaitingItem
from .space import Candidate, ParallelSizes, Question, partitioned, powers_of_two

_BINS = 8  # of lengths, to each doubling
_MOST_UNITS = 256  # of a sequence
_MANY_UNITS = 1024  # of a step: its bubble is small, and shorter ones gain little
_MOST_OF_STEP = 8 * _MANY_UNITS  # units; their memory takes seconds to find
_SHORTEST = 1024  # tokens of a unit; shorter ones leave a GPU waiting for its host
_CHUNKS = (1, 2, 4)  # more gain little where units are many
# At least this many sequences are drawn, in at least and at most so many steps.
_DRAWN = 1024
_FEWEST = 2
_MOST = 16


@dataclass(frozen=True)
class Average(Question):
    """A question on sequences that are all alike: attention sees `seen` pairs of a query and a key in each, and the
    busiest of some replicas has `of_busiest(replicas, whether replicas run equally many)` in a step. The batch only
    limits the number of replicas."""

    of_busiest: Callable[[int, bool], float] = lambda replicas, equal_counts: 1.0
    seen: float = 0.0

    def setup(self, sizes: ParallelSizes, chunks: int = 1, micro_batch_size: int = 1, **choices: Any) -> TrainingSetup:
        setup = super().setup(sizes, chunks, micro_batch_size, **choices)
        hides = setup.hides_tensor_exchange and self.by_megatron  # units differ in length
        return self._of_busiest(setup.but(seen=(self.seen,), hides_tensor_exchange=hides))

    def sharing_experts(self, setup: TrainingSetup, ranks: int) -> TrainingSetup:
        return self._of_busiest(super().sharing_experts(setup, ranks))

    def _of_busiest(self, setup: TrainingSetup) -> TrainingSetup:
        """The set-up with as many micro-batches as the busiest replica has."""
        sequences = self.of_busiest(setup.data_parallel, _has_equal_counts(setup))
        return setup.but(num_microbatches=max(1, int(sequences / setup.micro_batch_size)))


@dataclass(frozen=True)
class UnitPlan(Plan):
    """A configuration and its predicted steps; `prediction` is that of a step with the longest sequence. The set-up of
    `candidate` is that of its flags, with packs in place of units under Megatron's own schedules. A step has `tokens`
    on average and, beside them, a share of `padding`."""

    steps: tuple[Prediction, ...]
    tokens: float
    padding: float

    @property
    def seconds(self) -> float:
        return fmean(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bubble(self) -> float:
        return fmean(step.bubble for step in self.steps)

    @property
    def memory_gib(self) -> float:
        return max(Plan(self.candidate, step).memory_gib for step in (*self.steps, self.prediction))


def draw(histogram: Mapping[int, int], batch: int) -> Steps:
    """Steps of `batch` sequences, the same in every call: even quantiles of the histogram, in random order."""
    count = min(max(ceil(_DRAWN / batch), _FEWEST), _MOST)
    tokens = sorted(histogram)
    ends = [*accumulate(histogram[length] for length in tokens)]
    drawn = []
    place = 0
    for number in range(count * batch):
        while ends[place] * count * batch <= (number + 0.5) * ends[-1]:
            place += 1
        drawn.append(tokens[place])
    Random(0).shuffle(drawn)
    return tuple(tuple(drawn[first : first + batch]) for first in range(0, len(drawn), batch))


def in_bins(histogram: Mapping[int, int]) -> Mapping[int, int]:
    """The histogram with lengths that differ by less than a tenth as one, their mean; the longest stays. Units of many
    different lengths would each have costs of their own."""
    longest = max(histogram)
    bins = defaultdict[int, list[int]](list)
    for length in histogram:
        bins[-1 if length == longest else int(_BINS * log2(length))].append(length)
    found: Counter[int] = Counter()
    for lengths in bins.values():
        count = sum(histogram[length] for length in lengths)
        found[round(sum(length * histogram[length] for length in lengths) / count)] += count
    return found


class UnitSearch:
    """The plans for steps of `question.global_batch_size` sequences that are drawn from a histogram and cut off at
    `question.sequence_length`. Several `processes` share a long search."""

    def __init__(self, question: Question, histogram: Mapping[int, int], processes: int = 1) -> None:
        most = question.sequence_length
        counts: Counter[int] = Counter()
        for length, count in histogram.items():
            counts[min(length, most)] += count
        families = tuple(family for family in question.families if family in FAMILIES)
        self.question = replace(question, families=families, chunks=_CHUNKS, micro_batches=(1,), host_gib=0.0)
        self.steps = draw(in_bins(counts), question.global_batch_size)
        longest = max(counts)
        fullest = max(self.steps, key=max)
        self.fullest = (longest, *sorted(fullest)[:-1])
        self.tokens = fmean(map(sum, self.steps))
        self.histogram = counts
        self.least_seconds = 0.0  # of plans that `best` has not found; inf unless it ended early
        self._processes = processes
        self._predicted = lru_cache(maxsize=1024)(self._predict_step)

    def best(self, count: int = 5, exact_below: float = inf, within: float = inf) -> list[UnitPlan]:
        """The `count` configurations with the most tokens per second that fit, best first, and with less than `within`
        times the seconds of the first, of which layers are moved between its stages where that is faster. Units of
        which a step has very many are tried where nothing else fits.

        After many items, configurations of `exact_below` seconds or more need not be the fastest, see `Search.best`.
        They are chosen by the likely slowest replica of each step, and then predicted with the slowest of all."""
        sizes = self._sizes()
        few = [size for size in sizes if self.tokens <= size * _MANY_UNITS] or sizes[-1:]
        many = [size for size in sizes if size not in few]
        for tried in (few, many):
            search = _SearchOfSizes(self, tried, self._processes)
            likely = search.first_found(count, exact_below=exact_below, within=within)
            if likely:
                break
        has_ended_early = bool(likely) and search.least_seconds < likely[0].seconds
        self.least_seconds = search.least_seconds if has_ended_early else inf
        plans = [self.predict(plan.candidate) for plan in likely]
        if likely:
            moved = moved_layers.improved(likely[0].candidate, self.question, self.least_seconds_if_it_fits)
            with_moved_layers = self.predict(moved)
            if with_moved_layers.fits(self.question.budget):
                plans[0] = with_moved_layers
        return sorted(plans, key=attrgetter("seconds"))

    def least_seconds_if_it_fits(self, candidate: Candidate) -> float:
        """About what the likely slowest replicas of the steps take; inf if the longest sequence does not fit."""
        return self.least_seconds_in_time(candidate) if self.holds_longest(candidate) else inf

    def _sizes(self) -> list[int]:
        """The sizes of units that are tried, in tokens."""
        return [size for size in self.unit_tokens() if self.tokens <= size * _MOST_OF_STEP]

    def way_out(self) -> ValueError:
        """The error for a question without a plan."""
        asked = self.question
        shortest = min(self._sizes())
        also = ", or a smaller --global-batch-size" if shortest > min(self.unit_tokens()) else ""
        return ValueError(
            f"no configuration of {asked.num_devices} devices that divides a batch of {asked.global_batch_size} "
            f"sequences holds one of {max(self.fullest)} tokens in {asked.memory_limit:.0f} GiB a device, in units of "
            f"{shortest} tokens or more; take more --gpus, or a shorter --seq-length, which cuts off longer "
            f"sequences{also}"
        )

    def unit_tokens(self) -> list[int]:
        """Powers of two, up to one that holds the longest sequence, and not too short for that."""
        most = max(self.fullest)
        least = min(max(_SHORTEST, most // _MOST_UNITS), most)
        return [size for size in powers_of_two(2 * most - 1) if size >= least]

    def average(self, unit_tokens: int) -> Average:
        """The question for units of this size that are all alike."""
        pairs_in_all = fmean(sum(pairs(0, length, None) for length in step) for step in self.steps)
        units = self.tokens / unit_tokens
        flops = paper_flops(self.question.model)

        def of_busiest(replicas: int, equal_counts: bool) -> float:
            return units * _share_of_busiest(self.steps, unit_tokens, replicas, flops, equal_counts)

        one_unit = replace(self.question, sequence_length=unit_tokens, segments=(1,))
        return Average(**vars(one_unit), of_busiest=of_busiest, seen=pairs_in_all / units)

    def megatron_baseline(self) -> UnitPlan | None:
        """The best of Megatron's own schedules on packs as long as the longest sequence; None if nothing fits. Packs
        are made of all data at once, and all take the same time. The batch is what a step needs, rounded up for
        replicas to share it evenly."""
        length = self.question.sequence_length
        found = []
        packs = len(packs_of_step([*chain(*self.steps)], length)[0]) / len(self.steps)
        seen = self.average(length).seen * self.tokens / (length * packs)
        for batch in sorted({ceil(packs / ranks) * ranks for ranks in powers_of_two(int(packs))}):

            def of_each(replicas: int, equal_counts: bool, batch: int = batch) -> float:
                return batch / replicas

            packed = replace(self.question, global_batch_size=batch, micro_batches=(1, 2))
            search = Search(Average(**vars(packed), of_busiest=of_each, seen=seen).megatron_baseline())
            for best in search.best(1):
                tokens = self.tokens * batch / packs
                setup = best.candidate.setup
                padding = 1 - tokens / (setup.global_batch_size * length)
                found.append(UnitPlan(best.candidate, best.prediction, (best.prediction,), tokens, padding))
        return max(found, key=lambda plan: plan.tokens_per_second, default=None)

    def least_bytes(self, candidate: Candidate) -> float:
        """A lower bound on the fullest rank: its state, and on the first rank all units of the longest sequence."""
        packed = self.packed(candidate)
        return least_bytes(packed.setup_of(candidate.setup, packed.around_longest(0)))

    def holds_longest(self, candidate: Candidate) -> bool:
        """Whether the longest sequence fits beside those in flight with it. With several chunks, memory depends on its
        group of units, which differs from step to step: the fullest drawn step alone may be a favourable one."""
        setup = candidate.setup
        packed = self.packed(candidate)
        holds_all = setup.family == "breadth-first"
        order = packed.fullest if holds_all else packed.around_longest(setup.pipeline_parallel)
        of_step = packed.setup_of(setup, order)
        memory = (memory_of_order(of_step, packed.rank_order(setup, order, rank)) for rank in fullest_ranks(setup))
        return all(rank.total <= self.question.budget.device for rank in memory)

    def least_seconds_of_compute(self, candidate: Candidate) -> float:
        """A lower bound of `predict_likely` from compute."""
        setup = candidate.setup
        bounds = self.bounds(candidate)
        return fmean(bounds.by_compute(setup, order) for order in bounds.likely_slowest(setup))

    def least_seconds_in_time(self, candidate: Candidate) -> float:
        """A lower bound of `predict_likely` from compute and messages in time."""
        setup = candidate.setup
        bounds = self.bounds(candidate)
        return fmean(bounds.in_time(setup, order) for order in bounds.likely_slowest(setup))

    def predict_likely(self, candidate: Candidate) -> UnitPlan:
        """The plan of a candidate for average units with the likely slowest replica of each step."""
        return self._plan(candidate, self.bounds(candidate).likely_slowest(candidate.setup))

    def predict(self, candidate: Candidate) -> UnitPlan:
        """The plan of a candidate for average units, whether it fits or not. A step takes as long as its slowest
        replica."""
        bounds = self.bounds(candidate)

        def least_seconds(order: Order) -> float:
            return bounds.in_time(candidate.setup, order)

        return self._plan(candidate, [max(set(step), key=least_seconds) for step in self.packed(candidate).steps])

    def _plan(self, candidate: Candidate, slowest: Sequence[Order]) -> UnitPlan:
        """The plan by the slowest replica of each step."""
        packed = self.packed(candidate)
        length = self.question.sequence_length
        whole = candidate.setup.but(
            sequence_length=length,
            segments=(length,),
            seen=(),
            num_microbatches=self.question.global_batch_size // candidate.setup.data_parallel,
        )
        return UnitPlan(
            candidate=replace(candidate, setup=whole),
            prediction=self._predicted(candidate, packed.fullest),
            steps=tuple(self._predicted(candidate, order) for order in slowest),
            tokens=self.tokens,
            padding=packed.padding,
        )

    def _predict_step(self, candidate: Candidate, order: Order) -> Prediction:
        """The step of one replica."""
        packed = self.packed(candidate)
        setup = candidate.setup
        return predict(packed.setup_of(setup, order), self.question.machine, packed.schedule(setup, order))

    def packed(self, candidate: Candidate) -> PackedSteps:
        """The drawn steps, and the fullest one, as a candidate has them."""
        setup = candidate.setup
        assert candidate.unit_tokens is not None
        return packed_steps(
            (*self.steps, self.fullest),
            most=candidate.unit_tokens,
            multiple=segment_multiple(setup.token_shares, setup.context_parallel),
            replicas=setup.data_parallel,
            flops=paper_flops(setup.model),
            equal_counts=_has_equal_counts(setup),
        )

    def bounds(self, candidate: Candidate) -> PackedBounds:
        """Lower bounds of the drawn steps as a candidate has them."""
        return packed_bounds(self.packed(candidate), self.question.machine)


class _Timed(NamedTuple):
    """A candidate whose bound has the drawn steps in time."""

    candidate: Candidate


class _SearchOfUnits(Search):
    """The configurations for units of one size, fastest first. Average units bound set-ups until the actions of their
    steps have an order; then the drawn steps bound them, and are predicted."""

    def __init__(self, units: UnitSearch, unit_tokens: int) -> None:
        self._units = units
        self._unit_tokens = unit_tokens
        average = units.average(unit_tokens)

        @cache
        def accepts(candidate: Candidate) -> bool:
            return average.accepts(candidate) and units.holds_longest(self._in_units(candidate.setup))

        super().__init__(replace(average, accepts=accepts))

    def _closer(self, item: Any) -> Iterator[tuple[float, Any]]:
        match item:
            case Candidate(setup):
                candidate = self._in_units(setup)
                yield self._units.least_seconds_in_time(candidate), _Timed(candidate)
            case _Timed(candidate):
                plan = self._units.predict_likely(candidate)
                if plan.fits(self.question.budget):
                    yield plan.seconds, replace(plan, candidate=candidate)
            case _:
                yield from super()._closer(item)

    def _least_seconds_away(self, setup: TrainingSetup, segments: int) -> float:
        least = self._units.least_bytes(self._in_units(partitioned(self.question, setup)))
        return 0.0 if least <= self.question.budget.device else inf

    def _least_seconds(self, setup: TrainingSetup) -> float:
        return self._units.least_seconds_of_compute(self._in_units(setup))

    def _least_seconds_in_order(self, setup: TrainingSetup) -> float:
        return self._least_seconds(setup)  # most set-ups do not fit, and are left out before their order is made

    def _in_units(self, setup: TrainingSetup) -> Candidate:
        return Candidate(setup, unit_tokens=self._unit_tokens)


class _SearchOfSizes(Search):
    """The configurations for units of some `sizes`; of equal ones that for the size that comes first."""

    def __init__(self, units: UnitSearch, sizes: Sequence[int], processes: int) -> None:
        super().__init__(units.question, processes=processes)
        self._searches = [_SearchOfUnits(units, size) for size in sizes]

    def _first_waiting(self) -> list[WaitingItem]:
        waiting = []
        for number, search in enumerate(self._searches):
            for first in search._first_waiting():
                place = first.place._replace(path=(number, *first.place.path))
                waiting.append(first._replace(place=place, item=items.OfUnits(number, first.item)))
        heapify(waiting)
        return waiting

    def _closer(self, item: items.OfUnits) -> Iterator[tuple[float, Any]]:
        for least, closer in self._searches[item.number]._closer(item.item):
            if isinstance(closer, Plan):
                self._predicted.append(closer)
                yield least, closer
            else:
                yield least, items.OfUnits(item.number, closer)


def _has_equal_counts(setup: TrainingSetup) -> bool:
    """Whether replicas run equally many units, for collectives between them."""
    return setup.expert_parallel > 1 or setup.partitions_state


@lru_cache(maxsize=1024)
def _share_of_busiest(steps: Steps, most: int, replicas: int, flops: tuple[int, int], equal_counts: bool) -> float:
    """The work of the busiest replica of each step relative to that of all, in the mean over steps."""
    work = work_by_flops(*flops)

    def share(lengths: Sequence[int]) -> float:
        shares = packs_of_step(lengths, most, replicas=replicas, work=work, equal_counts=equal_counts)
        loads = [sum(work(lengths[number]) for pack in packs for number in pack.sequences) for packs in shares]
        return max(loads) / sum(loads)

    return fmean(map(share, steps))
