"""The best configurations: those that fit, by throughput."""

from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from ..costs.machine import GIB
from ..costs.simulator import Prediction, predict
from ..costs.stage_costs import action_costs, setup_costs
from ..costs.training_setup import Moves, TrainingSetup, splits_backward
from ..schedule import build
from . import moved_layers
from . import search_items as items
from .bounds import (
    least_seconds,
    least_seconds_copying,
    least_seconds_cut,
    least_seconds_in_time,
    unevenness_of_segments,
)
from .excess_bounds import copy_times, least_seconds_with_copies
from .fitting import SHARES, fits, fitted, host_in_flight, layers_leaving
from .forked import merged
from .memory_bounds import SizesMemory, least_seconds_away, with_room_for_state
from .module_bounds import least_seconds_moving_modules, least_seconds_moving_modules_in_time
from .rank_ends import CopyTimes
from .search_order import ItemPlace, SearchOrder, WaitingItem
from .space import (
    Candidate,
    MemoryBudget,
    Question,
    cuts,
    families,
    layers_in_chunks,
    may_move,
    may_move_by_layer,
    numbers_of_chunks,
    numbers_of_segments,
    parallel_sizes,
    partitioned,
    recomputed,
    spread_in_chunks,
    ways_to_move,
)
from .spread_bounds import least_seconds_in_chunks, least_seconds_of, least_seconds_of_any

# `auto` plans at the granularity of units, three thousand actions a second: of all winners together so many at most.
MOST_ACTIONS_OF_AUTO = 20_000
# Items that one process looks at, in some seconds, before others share the rest.
_ALONE = 5000
# Items that an early end looks at after its first plan, for others that are as good.
_AFTER_FIRST = 300


@dataclass(frozen=True)
class Plan:
    """A configuration and its predicted step, with the memory of the fullest rank on its device and on its host."""

    candidate: Candidate
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.prediction.tokens_per_second

    @property
    def memory_gib(self) -> float:
        return max(memory.total for memory in self.prediction.memory) / GIB

    @property
    def host_gib(self) -> float:
        return max(self.prediction.host_bytes) / GIB

    def fits(self, budget: MemoryBudget) -> bool:
        return self.memory_gib * GIB <= budget.device and self.host_gib * GIB <= budget.host


class _Step(NamedTuple):
    """An item was looked at by the process of this number: its place, the least seconds of all that are left to the
    process, the plan that it is, the plans that were predicted for that, and how many items are left."""

    process: int
    place: ItemPlace
    least: float
    plan: Plan | None
    predicted: tuple[Plan, ...]
    left: int


class Search:
    """The configurations that answer a question, fastest first; `plans` has all that were predicted, from the start on
    those of an earlier search, and `too_long_for_auto` the winners with too many actions for `auto`. `progress` is told
    how many items wait. If there are many, several `processes` share them.

    Items wait in the order of a lower bound of their step: sizes and numbers of segments, from these numbers of chunks,
    from these schedules, from these cuts, then what is computed again, the best cut that fits, and its prediction, each
    with a closer bound. The first item with its exact time is the fastest that is left: what was not found yet takes
    `least_seconds` at least.
    """

    def __init__(
        self,
        question: Question,
        progress: Callable[[int], None] = lambda left: None,
        plans: dict[Candidate, Plan] | None = None,
        processes: int = 1,
    ) -> None:
        self.question = question
        self._progress = progress
        self.plans: dict[Candidate, Plan] = {} if plans is None else plans
        self._predicted: list[Plan] = []  # since the last step
        self._processes = processes
        self.least_seconds = 0.0
        self.too_long_for_auto: set[Candidate] = set()

    def best(self, number: int = 5, below: float = inf, exact_below: float = inf, within: float = inf) -> list[Plan]:
        """The fastest configurations that fit and take less than `below` seconds, and less than `within` times as long
        as the fastest, which comes first. Its layers are moved between its stages, and `auto` is tried on all, where
        that is faster.

        After many items, configurations of `exact_below` seconds or more need not be the fastest. They take up to
        `MOST_OVER` times as long as those, and are found sooner."""
        found = self.first_found(number, below, exact_below, within)
        if found:
            moved = moved_layers.improved(found[0].candidate, self.question, self.seconds_if_it_fits)
            found[0] = self._plan(moved)
        if "auto" in self.question.families:
            found = sorted(found + self._automatic(found), key=attrgetter("seconds"))[:number]
        return found

    def megatron_baseline(self) -> Plan | None:
        """The best of Megatron's own schedules for the question; None if none fits."""
        search = Search(self.question.megatron_baseline(), self._progress, processes=self._processes)
        return next(iter(search.best(1)), None)

    def first_found(self, number: int, below: float = inf, exact_below: float = inf, within: float = inf) -> list[Plan]:
        """The first plans that a search comes to, fastest first, see `best`. An early end looks for others as good for
        a while, and then takes all that were predicted."""
        found: dict[Candidate, Plan] = {}
        last_item = inf
        with closing(self.by_bounds(exact_below)) as by_bounds:
            for item, (least, plan) in enumerate(by_bounds, start=1):
                if least >= below:
                    break
                if plan is not None and plan.seconds < below:
                    if not found and plan.seconds >= exact_below:
                        last_item = max(item, _ALONE) + _AFTER_FIRST
                    below = min(below, within * plan.seconds)
                    found[plan.candidate] = plan
                if len(found) == number:
                    break
                if item >= last_item:
                    found.update((plan.candidate, plan) for plan in self.plans.values() if self._answers(plan, below))
                    break
        return sorted(found.values(), key=attrgetter("seconds"))[:number]

    def _answers(self, plan: Plan, below: float) -> bool:
        return plan.seconds < below and plan.fits(self.question.budget)

    def by_bounds(self, exact_below: float = inf) -> Generator[tuple[float, Plan | None]]:
        """The seconds that all that is left takes at least, ascending, after each item; with the configuration that the
        item is, if it is one."""
        left = [0] * self._processes
        self.least_seconds = 0.0
        with closing(self._steps(exact_below)) as steps:
            for step in steps:
                self.plans.update((plan.candidate, plan) for plan in step.predicted)
                left[step.process] = step.left
                self._progress(sum(left))
                self.least_seconds = max(self.least_seconds, step.least)
                yield self.least_seconds, step.plan
        self.least_seconds = inf  # nothing is left

    def _steps(self, exact_below: float) -> Generator[_Step]:
        """The steps of the search: the first ones in this process, and then those of all processes."""
        waiting = self._first_waiting()
        yield from islice(self._look_at(waiting, SearchOrder(inf)), _ALONE)
        order = SearchOrder(exact_below)
        in_order = sorted(map(order.placed, waiting))
        shares = (in_order[first :: self._processes] for first in range(self._processes))
        steps = [self._look_at(share, order, process) for process, share in enumerate(shares) if share]
        yield from merged(steps, attrgetter("place"), self._processes)

    def _first_waiting(self) -> list[WaitingItem]:
        """The items of all parallel sizes, as a heap."""
        question = self.question
        with_room = (with_room_for_state(question, sizes) for sizes in parallel_sizes(question))
        first_ones = [first for sizes in filter(None, with_room) for first in _first_ones(question, sizes)]
        waiting = []
        for number, first in enumerate(first_ones):
            bound = least_seconds_of_any(first.setup, question, first.segments[0])
            has_pipeline = first.setup.pipeline_parallel > 1
            waiting.append(WaitingItem(ItemPlace(bound, -1, (number,)), bound, has_pipeline, first))
        heapify(waiting)
        return waiting

    def _look_at(self, waiting: list[WaitingItem], order: SearchOrder, process: int = 0) -> Iterator[_Step]:
        """Look at the items of a heap, the first ones first, and put what they are refined to in their place."""
        while waiting:
            place, bound, has_pipeline, item = heappop(waiting)
            plan = item if isinstance(item, Plan) else None
            if plan is None:
                for number, (least, closer) in enumerate(self._closer(item)):
                    closer_bound = max(bound, least)
                    of_closer = ItemPlace(closer_bound, self._place_of_family(closer), (*place.path, number))
                    heappush(waiting, order.placed(WaitingItem(of_closer, closer_bound, has_pipeline, closer)))
            predicted = tuple(self._predicted)
            self._predicted.clear()
            yield _Step(process, place, order.least_left(place), plan, predicted, len(waiting))

    def _place_of_family(self, item: Any) -> int:
        """Of plans that take equally long the simplest family comes first, whatever their bounds were."""
        return self.question.families.index(item.candidate.setup.family) if isinstance(item, Plan) else -1

    def _closer(self, item: Any) -> Iterator[tuple[float, Any]]:
        """The items that an item is refined to, with lower bounds."""
        question = self.question
        machine = self.question.machine
        match item:
            case items.Sizes(sizes, (segments, *more)):
                if more:
                    yield least_seconds_of_any(sizes, question, more[0]), items.Sizes(sizes, tuple(more))
                setups = tuple(recomputed(question, sizes, segments))
                memory = SizesMemory(question, sizes, segments)
                for splits in sorted(set(map(splits_backward, question.families))):
                    for alike in _groups(self._likely(setups, memory, splits), _HIDES_AND_SHARDS):
                        bounds = (least_seconds_of(setup, machine, segments, splits) for setup in _fastest_of(alike))
                        yield min(bounds), items.Open(alike, segments, splits)
            case items.Open():
                yield from self._numbers_of_chunks(item)
            case items.OfChunks(sizes, chunks):
                yield from self._in_chunks(sizes, chunks)
            case items.InChunks(families_of, segments):
                yield from self._spread(families_of, segments)
            case items.Spread(away, segments):
                for of_cuts in self._alike_cuts(away, segments):
                    yield min(least_seconds(setup, machine) for setup in of_cuts.fastest), of_cuts
            case items.AlikeCuts(fastest=fastest):
                yield min(map(self._least_seconds_in_order, fastest)), items.Timed(item)
            case items.Timed(items.AlikeCuts(of_setups=of_setups)):
                for cut in of_setups:
                    least = min(least_seconds(candidate.setup, machine) for candidate in cut.ranked)
                    of_copies = self._least_seconds_of_modules(cut.ranked[0].setup, cut.away)
                    if of_copies < inf:
                        yield max(least, of_copies), cut
            case items.Cuts():
                yield from self._fitting(item)
            case items.TooLarge(ranked):
                yield min(self._least_seconds_moving(candidate.setup) for candidate in ranked), items.Timed(item)
            case items.Timed(items.TooLarge(ranked)):
                yield from self._moved(ranked)
            case Candidate(setup):
                yield (
                    max(self._least_seconds_in_order(setup), self._least_seconds_of_last_rank(setup)),
                    items.Timed(item),
                )
            case items.Timed(Candidate() as candidate):
                found = first_that_fits(candidate, question.budget, self._plan) if question.accepts(candidate) else None
                if found is not None:
                    yield found.prediction.seconds, found

    def _least_seconds_away(self, setup: TrainingSetup, segments: int) -> float:
        """A lower bound from copies to the host; inf if the set-up cannot fit."""
        by_layer = self.question.by_megatron or may_move_by_layer(self.question, setup)
        return least_seconds_away(partitioned(self.question, setup), self.question.budget, segments, by_layer)

    def _least_seconds_of_modules(self, setup: TrainingSetup, away: float) -> float:
        """A closer bound of Megatron's own set-ups in a pipeline that take `away` seconds for copies at least; inf if
        they cannot fit."""
        if away and self._moves_modules(setup):
            return least_seconds_moving_modules(setup, self.question.machine, self.question.budget.device)
        return away

    def _moves_modules(self, setup: TrainingSetup) -> bool:
        return self.question.by_megatron and setup.pipeline_parallel > 1

    def _least_seconds_cut(self, setup: TrainingSetup, segments: int) -> float:
        """A lower bound from compute for all cuts."""
        return least_seconds_cut(setup, self.question.machine, segments)

    def _least_seconds(self, setup: TrainingSetup) -> float:
        """A lower bound from compute."""
        return least_seconds(setup, self.question.machine)

    def _least_seconds_in_order(self, setup: TrainingSetup) -> float:
        """A lower bound by the order of actions."""
        return least_seconds_in_time(setup, self.question.machine)

    def _likely(self, setups: Iterable[TrainingSetup], memory: SizesMemory, splits: bool) -> Iterator[TrainingSetup]:
        """The set-ups that may fit under schedules that split backwards, or under those that do not. Some of the latter
        depend on the number of chunks, so they are looked for later."""
        for setup in setups:
            has_family = not splits or any(map(splits_backward, families(self.question, setup)))
            if has_family and memory.may_fit(setup, splits):
                yield setup

    def _numbers_of_chunks(self, item: items.Open) -> Iterator[tuple[float, items.OfChunks]]:
        """Set-ups by the number of their chunks, with a bound from the layers of stages."""
        question = self.question
        of_chunks = defaultdict[int, list[TrainingSetup]](list)
        for setup in item.setups:
            for chunks in numbers_of_chunks(question, setup):
                if not item.splits or self._may_split(setup, chunks, item.segments):
                    of_chunks[chunks].append(setup)
        for chunks, setups in of_chunks.items():
            spreads = {setup: layers_in_chunks(question, setup, chunks) for setup in setups}
            least = inf
            for setup in _fastest_of(setups):
                stands_for_all = setup.recompute == "none"
                of_these = set(spreads.values()) if stands_for_all else {spreads[setup]}
                seconds = least_seconds_in_chunks(setup, question.machine, item.segments, item.splits, of_these)
                least = min(least, seconds)
            yield least, items.OfChunks(item._replace(setups=tuple(setups)), chunks)

    def _may_split(self, sizes: TrainingSetup, chunks: int, segments: int) -> bool:
        """Whether a set-up with so many chunks may fit under a schedule that splits backwards. Few do, since nothing
        moves to the host, so this is asked first."""
        setup = spread_in_chunks(self.question, sizes, chunks)
        splitting = filter(splits_backward, families(self.question, setup))
        return any(self._least_seconds_away(_of_family(setup, name), segments) < inf for name in splitting)

    def _in_chunks(self, item: items.Open, chunks: int) -> Iterator[tuple[float, items.InChunks]]:
        """Set-ups with layers spread over the stages of so many chunks. The bound of one of their families is that of
        all."""
        question = self.question
        spread_out = (spread_in_chunks(question, sizes, chunks) for sizes in item.setups)
        for alike in _groups(spread_out, _ALL_BUT_RECOMPUTATION):
            families_of = {}
            for setup in alike:
                names = [name for name in families(question, setup) if splits_backward(name) == item.splits]
                if names:
                    families_of[setup] = names
            if families_of:
                name = next(iter(families_of.values()))[0]
                fastest = [_of_family(setup, name) for setup in _fastest_of(tuple(families_of))]
                least = min(least_seconds_cut(setup, question.machine, item.segments) for setup in fastest)
                yield least, items.InChunks(families_of, item.segments)

    def _spread(
        self, families_of: Mapping[TrainingSetup, Sequence[str]], segments: int
    ) -> Iterator[tuple[float, items.Spread]]:
        """Set-ups with a family, those that may fit."""
        away: dict[TrainingSetup, float] = {}
        for setup, names in families_of.items():
            for name in names:
                of_family = _of_family(setup, name)
                seconds = self._least_seconds_away(of_family, segments)
                if seconds < inf:
                    away[of_family] = seconds
        for alike in _groups(away, _ALL_BUT_RECOMPUTATION):
            of_alike = {setup: away[setup] for setup in alike}
            least = self._least_seconds_spread(of_alike, segments)
            if least < inf:
                yield least, items.Spread(of_alike, segments)

    def _least_seconds_spread(self, away: Mapping[TrainingSetup, float], segments: int) -> float:
        """A lower bound from compute and copies of set-ups with their seconds for these at least. Copies of modules
        take long to look at, so they are for the fastest alone."""
        bounds = {setup: max(seconds, self._least_seconds_cut(setup, segments)) for setup, seconds in away.items()}
        least = inf
        for setup in sorted(bounds, key=bounds.__getitem__):
            if bounds[setup] >= least:
                break
            least = min(least, max(bounds[setup], self._least_seconds_of_modules(setup, away[setup])))
        return least

    def _alike_cuts(self, away: Mapping[TrainingSetup, float], segments: int) -> Iterator[items.AlikeCuts]:
        """The cuts of set-ups. Cuts with tensor-parallel collectives beside products and cuts without are separate,
        since bounds do not rank them."""
        by_fastest = defaultdict[tuple[TrainingSetup, ...], list[items.Cuts]](list)
        for setup, seconds in away.items():
            ranked = self._ranked_cuts(setup, segments)
            for hides in (True, False):
                alike = tuple(candidate for candidate in ranked if candidate.setup.hides_tensor_exchange == hides)
                if alike:
                    fastest = tuple(dict.fromkeys(candidate.setup.without_recomputation() for candidate in alike))
                    by_fastest[fastest].append(items.Cuts(alike, seconds))
        for fastest, of_setups in by_fastest.items():
            unevenness = min(unevenness_of_segments(setup, self.question.machine) for setup in fastest)
            yield items.AlikeCuts(fastest, tuple(of_setups), unevenness)

    def _ranked_cuts(self, setup: TrainingSetup, segments: int) -> list[Candidate]:
        """The cuts of a set-up, the fastest first, with a partitioned state behind those without."""
        even_last = [*cuts(setup, segments)][::-1]
        shares = [replace(candidate, setup=partitioned(self.question, candidate.setup)) for candidate in even_last]
        return list(dict.fromkeys(even_last + shares))

    def _fitting(self, found: items.Cuts) -> Iterator[tuple[float, Any]]:
        """The first allowed cut that fits. Those before it come as one item, since they may fit with activations on the
        host."""
        question = self.question
        budget = question.budget
        too_large = []
        fitting = None
        for candidate in found.ranked:
            if found.away > 0 or not fits(candidate.setup, budget.device):
                too_large.append(candidate)
            elif question.accepts(candidate):
                fitting = candidate
                break
        if budget.host and may_move(found.ranked[0].setup):
            accepted = tuple(filter(question.accepts, too_large))
            if accepted:
                yield self._least_seconds_too_large(accepted), items.TooLarge(accepted)
        if fitting is not None:
            yield self._least_seconds(fitting.setup), fitting

    def _least_seconds_too_large(self, ranked: Iterable[Candidate]) -> float:
        """A lower bound from compute, and from copies of what does not fit."""
        least = inf
        for candidate in ranked:
            setup = candidate.setup
            with_copies = least_seconds_with_copies(setup, self.question.machine, self._copy_times(setup))
            least = min(least, max(self._least_seconds(setup), with_copies))
        return least

    def _least_seconds_moving(self, setup: TrainingSetup) -> float:
        """A lower bound by the order of actions, and from copies of what does not fit."""
        if self._moves_modules(setup):
            return least_seconds_moving_modules_in_time(setup, self.question.machine, self.question.budget.device)
        return least_seconds_in_time(setup, self.question.machine, self._copy_times(setup))

    def _copy_times(self, setup: TrainingSetup) -> CopyTimes | None:
        """The copies of what does not fit, where units move. Parts of units move within actions."""
        question = self.question
        if question.by_megatron:
            return None
        return copy_times(setup, question.machine, question.budget, may_move_by_layer(question, setup))

    def _moved(self, ranked: tuple[Candidate, ...]) -> Iterator[tuple[float, Candidate]]:
        """The first cut that fits with activations on the host, each way to move them, if the host has room. Units move
        layer by layer where the fastest cut does not fit otherwise, or where copies hold it up."""
        question = self.question
        found = [self._first_moved(ranked, moves) for moves in ways_to_move(question, ranked[0].setup)]
        if may_move_by_layer(question, ranked[0].setup) and self._is_held_up(found[0], ranked[0].setup):
            for most in layers_leaving(ranked[0].setup, question.machine):
                by_layer = [replace(candidate, setup=candidate.setup.but(layers_leaving=most)) for candidate in ranked]
                found.append(self._first_moved(by_layer, Moves.UNITS))
        yield from filter(None, found)

    def _is_held_up(self, moved: tuple[float, Candidate] | None, fastest: TrainingSetup) -> bool:
        """Whether copies make what was found slower than the compute of the fastest cut, or nothing was found."""
        if moved is None:
            return True
        least, candidate = moved
        seconds = self._least_seconds(fastest)
        return least > seconds or self._least_seconds_of_last_rank(candidate.setup) > seconds

    def _least_seconds_of_last_rank(self, setup: TrainingSetup) -> float:
        """A lower bound from the units that the last rank moves to its host."""
        return least_seconds_copying(setup, self.question.machine, setup.pipeline_parallel - 1)

    def _first_moved(self, ranked: Iterable[Candidate], moves: Moves) -> tuple[float, Candidate] | None:
        """The first cut that fits with activations on the host, and a lower bound from compute and from what the first
        rank moves; None if the host has no room."""
        machine = self.question.machine
        budget = self.question.budget
        for candidate in ranked:
            setup = fitted(candidate.setup, budget, moves)
            if setup is not None:
                if not setup.moves_parts and host_in_flight(setup) > budget.host:
                    return None
                least = max(least_seconds(setup, machine), least_seconds_copying(setup, machine, rank=0))
                return least, replace(candidate, setup=setup)
        return None

    def _automatic(self, winners: Iterable[Plan]) -> list[Plan]:
        """The plans of winners with `auto` that fit and are faster."""
        faster: dict[Candidate, Plan] = {}
        actions_left = MOST_ACTIONS_OF_AUTO
        for winner in winners:
            # Its weight gradients run later, so collectives cannot hide behind them; it has no pairs.
            setup = winner.candidate.setup.but(family="auto", hides_tensor_exchange=False, hides_experts=False)
            candidate = replace(winner.candidate, setup=setup)
            if setup.pipeline_parallel == 1 or setup.recompute != "none" or not self.question.accepts(candidate):
                continue
            num_actions = 3 * setup.shape.num_units * setup.placement.num_stages
            if num_actions > actions_left:
                self.too_long_for_auto.add(candidate)
                continue
            actions_left -= num_actions
            found = self._plan(candidate)
            if found.fits(self.question.budget) and found.seconds < winner.seconds:
                faster[candidate] = found
        return list(faster.values())

    def seconds_if_it_fits(self, candidate: Candidate) -> float:
        """The step of a candidate; inf if it does not fit."""
        found = self._plan(candidate)
        return found.seconds if found.fits(self.question.budget) else inf

    def _plan(self, candidate: Candidate) -> Plan:
        if candidate not in self.plans:
            predicted = predict_candidate(candidate, self.question)
            self.plans[candidate] = predicted
            self._predicted.append(predicted)
        return self.plans[candidate]


def _of_family(setup: TrainingSetup, family: str) -> TrainingSetup:
    return setup if setup.family == family else setup.but(family=family)


# What the set-ups of a group have in common.
_HIDES_AND_SHARDS = attrgetter("hides_experts", "fsdp")  # of set-ups of the same sizes
_ALL_BUT_RECOMPUTATION = attrgetter("keeps_logits", "replays_layers", "layers_per_stage", "family")  # beside these


def _groups(
    setups: Iterable[TrainingSetup], in_common: Callable[[TrainingSetup], Hashable]
) -> Iterator[tuple[TrainingSetup, ...]]:
    groups = defaultdict[Hashable, list[TrainingSetup]](list)
    for setup in setups:
        groups[in_common(setup)].append(setup)
    for alike in groups.values():
        yield tuple(alike)


def _fastest_of(alike: Sequence[TrainingSetup]) -> Sequence[TrainingSetup]:
    """Those of a group among which the fastest is: the one that computes nothing again, not even logits if they may be
    kept, or all if the group has none such."""
    without = [setup for setup in alike if setup.recompute == "none"]
    return [max(without, key=attrgetter("keeps_logits"))] if without else alike


def _first_ones(question: Question, sizes: TrainingSetup) -> Iterator[items.Sizes]:
    """Whole sequences, and segments, of which more never have a lower bound."""
    numbers = sorted(numbers_of_segments(question, sizes))
    for several in (False, True):
        if chosen := tuple(segments for segments in numbers if (segments > 1) == several):
            yield items.Sizes(sizes, chosen)


def first_that_fits(candidate: Candidate, budget: MemoryBudget, predicted: Callable[[Candidate], Plan]) -> Plan | None:
    """The `predicted` plan of a candidate; None if it does not fit. If it moves units, then the first that fits with as
    many or more of them: `fitted`, which has chosen their share, looks at some ranks and few micro-batches, but every
    rank rounds the share to whole units of its own order."""
    setup = candidate.setup
    moves_units = setup.offloads > 0 and not setup.moves_parts
    shares = [number / SHARES for number in range(1, SHARES + 1)]
    more = [share for share in shares if moves_units and share > setup.offloads]
    for moving in (candidate, *(replace(candidate, setup=setup.but(offloads=share)) for share in more)):
        plan = predicted(moving)
        if plan.fits(budget):
            return plan
        if plan.host_gib * GIB > budget.host:
            return None
    return None


def predict_candidate(candidate: Candidate, question: Question) -> Plan:
    """Predict a candidate, whether or not it fits; `auto` plans by the costs that training has."""
    setup = candidate.setup
    schedule = None
    if setup.family == "auto":
        costs = action_costs(setup_costs(setup), setup.layers_per_stage, setup.segments)
        schedule = build("auto", setup.shape, costs)
    return Plan(candidate, predict(setup, question.machine, schedule))
