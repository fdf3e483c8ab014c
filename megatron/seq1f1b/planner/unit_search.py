"""The fastest configurations for sequences of unequal lengths, in units of at most so many tokens (--unit-tokens).

A few steps are drawn from a histogram of lengths and packed as in training. A fast search over steps of average units
gives configurations in the order of their throughput; the first ones that hold the longest sequence are predicted for
the drawn steps, every unit with its own tokens and attention.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from heapq import merge
from itertools import accumulate, chain, pairwise
from math import ceil, inf, lcm, log2
from operator import itemgetter, truediv
from random import Random
from statistics import fmean
from typing import Any

from ..costs.blocks import pairs, paper_flops
from ..costs.layer_times import comm_type_of_segments
from ..costs.simulator import Prediction, predict
from ..costs.stage_times import Row, stage_rows
from ..costs.step_memory import rank_memory
from ..costs.training_setup import TrainingSetup
from ..partition import Pack, packs_of_step, segment_multiple, work_by_flops
from ..schedule import FAMILIES, Action, Schedule, Shape
from .fitting import fullest_ranks
from .search import Plan, Search
from .space import Candidate, Question, powers_of_two

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
type Steps = tuple[tuple[int, ...], ...]  # the lengths of the sequences of each
# Lengths of units are rounded up to multiples of this part of the longest.
_PARTS = 64


@dataclass(frozen=True)
class Average(Question):
    """A question on sequences that are all alike: attention sees `seen` pairs of a query and a key in each, and the
    busiest of some replicas has `of_busiest(replicas)` in a step. The batch only limits the number of replicas."""

    of_busiest: Callable[[int], float] = float
    seen: float = 0.0

    def setup(self, sizes: tuple[int, int, int, int], *arguments: Any, **choices: Any) -> TrainingSetup:
        setup = super().setup(sizes, *arguments, **choices)
        own = int(self.of_busiest(setup.data_parallel) / setup.micro_batch_size)
        hides = setup.hides_tensor_exchange and self.by_megatron  # units differ in length
        return replace(setup, num_microbatches=max(1, own), seen=(self.seen,), hides_tensor_exchange=hides)


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
    `question.sequence_length`."""

    def __init__(self, question: Question, histogram: Mapping[int, int]) -> None:
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

    def best(self, count: int = 5) -> list[UnitPlan]:
        """The `count` configurations with the most tokens per second that fit, best first. Units of which a step has
        very many are tried where nothing else fits."""
        sizes = self._sizes()
        few = [size for size in sizes if self.tokens <= size * _MANY_UNITS] or sizes[-1:]
        return self._best(few, count) or self._best([size for size in sizes if size not in few], count)

    def _sizes(self) -> list[int]:
        """Those of units that are tried."""
        return [size for size in self.unit_tokens() if self.tokens <= size * _MOST_OF_STEP]

    def _best(self, sizes: Sequence[int], count: int) -> list[UnitPlan]:
        """Those for units of some sizes: chosen by the likely slowest replica of each step, then predicted with all
        replicas."""
        streams = (self._by_average(tokens) for tokens in sizes)
        found: list[tuple[float, Candidate]] = []
        for average, candidate in merge(*streams, key=itemgetter(0)):
            below = found[-1][0] if len(found) >= count else inf
            if average > below:
                break
            seconds = self._likely_seconds(candidate, below)
            if seconds < inf:
                found = sorted([*found, (seconds, candidate)], key=itemgetter(0))[:count]
        return sorted((self.predict(candidate) for _, candidate in found), key=lambda plan: plan.seconds)

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

        def of_busiest(replicas: int) -> float:
            return units * _share_of_busiest(self.steps, unit_tokens, replicas, paper_flops(self.question.model))

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
            packed = replace(self.question, global_batch_size=batch, micro_batches=(1, 2))
            search = Search(Average(**vars(packed), of_busiest=partial(truediv, batch), seen=seen).megatron_baseline())
            for best in search.best(1):
                tokens = self.tokens * batch / packs
                setup = best.candidate.setup
                padding = 1 - tokens / (setup.global_batch_size * length)
                found.append(UnitPlan(best.candidate, best.prediction, (best.prediction,), tokens, padding))
        return max(found, key=lambda plan: plan.tokens_per_second, default=None)

    def _by_average(self, unit_tokens: int) -> Iterator[tuple[float, Candidate]]:
        """Configurations that hold the longest sequence, with the seconds of a step of average units, ascending."""
        average = self.average(unit_tokens)

        @cache
        def accepts(candidate: Candidate) -> bool:
            return average.accepts(candidate) and self.holds_longest(replace(candidate, unit_tokens=unit_tokens))

        for plan in Search(replace(average, accepts=accepts)).fastest_first():
            yield plan.prediction.seconds, replace(plan.candidate, unit_tokens=unit_tokens)

    def holds_longest(self, candidate: Candidate) -> bool:
        """Whether the longest sequence fits beside those in flight with it. With several chunks, memory depends on its
        group of units, which differs from step to step: the fullest drawn step alone may be a favourable one."""
        packed = self._packed(candidate)
        setup = packed.setup_of(candidate.setup)
        holds_all = setup.family == "breadth-first"
        step = packed.fullest if holds_all else packed.around_longest(setup.pipeline_parallel)
        orders = packed.schedule(setup, step).ranks
        memory = (rank_memory(setup, orders[rank], rank) for rank in fullest_ranks(setup))
        return all(rank.total <= self.question.budget.device for rank in memory)

    def _likely_seconds(self, candidate: Candidate, below: float) -> float:
        """Of a step with the likely slowest replica, in the mean; inf if one of them or the fullest does not fit, or if
        compute alone takes `below` seconds."""
        packed = self._packed(candidate)
        machine = self.question.machine
        setup = packed.setup_of(candidate.setup)
        rows = stage_rows(setup, machine)
        slowest = [max(step, key=packed.seconds(setup, rows)) for step in packed.steps]
        if fmean(packed.compute(setup, rows, order) for order in slowest) >= below:
            return inf
        steps = [predict(setup, machine, packed.schedule(setup, order)) for order in slowest]
        orders = packed.schedule(setup, packed.fullest).ranks
        fullest = (rank_memory(setup, order, rank) for rank, order in enumerate(orders))
        most = max(rank.total for rank in chain(*(step.memory for step in steps), fullest))
        return fmean(step.seconds for step in steps) if most <= self.question.budget.device else inf

    def predict(self, candidate: Candidate) -> UnitPlan:
        """The plan of a candidate for average units, whether it fits or not. A step takes as long as its slowest
        replica."""
        packed = self._packed(candidate)
        machine = self.question.machine
        setup = packed.setup_of(candidate.setup)

        def predicted(order: tuple[int, ...]) -> Prediction:
            return predict(setup, machine, packed.schedule(setup, order))

        steps = tuple(max(map(predicted, set(step)), key=lambda each: each.seconds) for step in packed.steps)
        length = self.question.sequence_length
        size = self.question.global_batch_size
        share = size // setup.data_parallel
        whole = replace(candidate.setup, sequence_length=length, segments=(length,), seen=(), num_microbatches=share)
        return UnitPlan(replace(candidate, setup=whole), predicted(packed.fullest), steps, self.tokens, packed.padding)

    def _packed(self, candidate: Candidate) -> "_Packed":
        setup = candidate.setup
        multiple = segment_multiple(setup.token_shares, setup.context_parallel)
        assert candidate.unit_tokens is not None
        return _packed(
            (*self.steps, self.fullest),
            most=candidate.unit_tokens,
            multiple=multiple,
            replicas=setup.data_parallel,
            flops=paper_flops(setup.model),
            equal_counts=setup.expert_parallel > 1 or setup.partitions_state,
        )


@lru_cache(maxsize=1024)
def _share_of_busiest(steps: Steps, most: int, replicas: int, flops: tuple[int, int]) -> float:
    """The work of the busiest replica of each step relative to that of all, in the mean over steps."""
    work = work_by_flops(*flops)

    def share(lengths: Sequence[int]) -> float:
        shares = packs_of_step(lengths, most, replicas=replicas, work=work)
        loads = [sum(work(lengths[number]) for pack in packs for number in pack.sequences) for packs in shares]
        return max(loads) / sum(loads)

    return fmean(map(share, steps))


class _Packed:
    """Steps in units; the last of them is the fullest one. The kind of a micro-batch is the tokens of its units,
    rounded up. Micro-batches of a kind have their mean attention, since time is linear in it. `kinds` has the tokens
    and the pairs that are seen of every unit of a kind; `steps` has, for each replica, the kinds of its micro-batches;
    `fullest` those of a replica with the longest sequence. `firsts` is the first column of each kind in the tables of
    costs, then the number of columns."""

    def __init__(
        self, steps: Steps, most: int, multiple: int, replicas: int, flops: Sequence[int], equal_counts: bool
    ) -> None:
        part = lcm(multiple, max(1, most // _PARTS))

        def kind_of(pack: Pack) -> tuple[int, ...]:
            return tuple(min(most, ceil(tokens / part) * part) for tokens in pack.lengths)

        seen: defaultdict[tuple[int, ...], list[list[float]]] = defaultdict(list)
        by_kind = []
        tokens = 0
        for lengths in steps:
            shares = packs_of_step(lengths, most, multiple, replicas, work_by_flops(*flops), equal_counts)
            tokens += sum(sum(pack.lengths) for share in shares for pack in share)
            by_kind.append([[kind_of(pack) for pack in share] for share in shares])
            for pack in chain(*shares):
                seen[kind_of(pack)].append(seen_by_units(pack, lengths))
        numbers = {kind: number for number, kind in enumerate(seen)}
        self.kinds = [(kind, tuple(map(fmean, zip(*each, strict=True)))) for kind, each in seen.items()]

        def numbered(of_replicas: list[list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
            return [tuple(numbers[kind] for kind in order) for order in of_replicas]

        self.steps = [numbered(of_step) for of_step in by_kind[:-1]]
        fullest_step = numbered(by_kind[-1])
        self.fullest = max(fullest_step, key=lambda order: max(sum(self.kinds[kind][0]) for kind in order))
        self.longest = max(max(map(max, steps)), most)
        self.padding = 1 - sum(map(sum, steps)) / tokens
        self.firsts = [*accumulate((len(lengths) for lengths, _ in self.kinds), initial=0)]
        self.setup_of = lru_cache(maxsize=1024)(self._setup_of)

    def _setup_of(self, setup: TrainingSetup) -> TrainingSetup:
        way = None if setup.context_parallel == 1 else comm_type_of_segments(setup)
        one_batch = replace(setup, longest=self.longest, num_microbatches=1, cp_comm_type=way, seen=())
        parts = tuple(
            replace(one_batch, sequence_length=sum(lengths), segments=lengths, seen=seen)
            for lengths, seen in self.kinds
        )
        columns = tuple(chain(*(lengths for lengths, _ in self.kinds)))
        return replace(one_batch, sequence_length=sum(columns), segments=columns, parts=parts)

    def around_longest(self, count: int) -> tuple[int, ...]:
        """The fullest step from `count` micro-batches before its longest one to as many after it."""
        longest = max(range(len(self.fullest)), key=lambda place: sum(self.kinds[self.fullest[place]][0]))
        return self.fullest[max(0, longest - count) : longest + count + 1]

    def schedule(self, setup: TrainingSetup, order: Sequence[int]) -> Schedule:
        """The step of a replica, segments numbered by their columns."""
        built = FAMILIES[setup.family](Shape.of(setup.placement, [len(self.kinds[kind][0]) for kind in order]))
        starts = [self.firsts[kind] for kind in order]
        ranks = (
            tuple(Action(kind, stage, number, starts[number] + segment) for kind, stage, number, segment in actions)
            for actions in map(built.order, range(setup.pipeline_parallel))
        )
        return Schedule(Shape(setup.placement, len(order), self.firsts[-1]), tuple(ranks))

    def compute(self, setup: TrainingSetup, rows: Sequence[tuple[Row, Row, Row]], order: Sequence[int]) -> float:
        """The seconds of compute of the busiest rank of a replica, for some kinds."""
        counts = Counter(order)

        def of_stage(stage: int) -> float:
            of_column = [sum(times) for times in zip(*rows[stage], strict=True)]
            return sum(count * sum(of_column[slice(*self.firsts[kind : kind + 2])]) for kind, count in counts.items())

        placement = setup.placement
        return max(sum(map(of_stage, placement.stages_of(rank))) for rank in range(placement.num_ranks))

    def seconds(self, setup: TrainingSetup, rows: Sequence[tuple[Row, Row, Row]]) -> Callable[[Sequence[int]], float]:
        """About the time of a replica for some kinds, up to a factor: its compute, and a bubble of P - 1 units."""
        of_column: list[float] = [sum(times) for times in zip(*chain(*rows), strict=True)]
        of_kind: list[float] = [sum(of_column[first:end]) for first, end in pairwise(self.firsts)]
        bubble = (setup.pipeline_parallel - 1) / setup.placement.num_chunks  # in units

        def of_replica(order: Sequence[int]) -> float:
            units = sum(len(self.kinds[kind][0]) for kind in order)
            return sum(of_kind[kind] for kind in order) * (1 + bubble / units)

        return of_replica


_packed = lru_cache(maxsize=256)(_Packed)


def seen_by_units(pack: Pack, lengths: Sequence[int]) -> list[float]:
    """The pairs of a query and a key of one sequence that each unit of a pack computes."""
    ends = [*accumulate(pack.lengths)]
    seen = [0.0] * len(ends)
    unit = 0
    now = 0
    for number in pack.sequences:
        start = now
        end = now + lengths[number]
        while now < end:
            stop = min(end, ends[unit])
            seen[unit] += pairs(now - start, stop - start, None)
            now = stop
            unit += now == ends[unit]
    return seen
