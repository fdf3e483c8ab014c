"""The memory of the ranks that may be fullest, and what has to move to the host so that it fits."""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from math import ceil

from ..costs.layer_bytes import moved_bytes
from ..costs.machine import Machine
from ..costs.stage_times import stage_rows
from ..costs.step_memory import Memory, RankOrder, host_bytes, memory_of_order
from ..costs.training_setup import Moves, StageLayers, TrainingSetup, of_stages
from ..schedule import Shape, clock_of, units_to_move, with_moves
from .space import MemoryBudget

# A search moves sixteenths of activations to the host.
SHARES = 16
# Of a unit that moves layer by layer: one that leaves and one that waits for it.
_FEW_LAYERS = 2


def fullest_ranks(setup: TrainingSetup) -> Iterable[int]:
    """The ranks that may be fullest: the first has the most units, the last the loss, a third the largest layers."""
    return dict.fromkeys((0, setup.pipeline_parallel - 1, _rank_of_largest_layers(setup)))


def _rank_of_largest_layers(setup: TrainingSetup) -> int:
    """The first rank whose layers have the most parameters: of two with as many layers one may have dense ones, and the
    other experts."""

    def of_layers(stage: StageLayers) -> float:
        return sum(count * sum(setup.layer_parameters(layer)) for layer, count in stage.layers)

    sizes = of_stages(setup.model, setup.layers_per_stage, of_layers)
    stages_of = setup.placement.stages_of
    return max(range(setup.pipeline_parallel), key=lambda rank: sum(sizes[stage] for stage in stages_of(rank)))


def memory_in_flight(setup: TrainingSetup) -> Iterator[Memory]:
    """The memory of each of `fullest_ranks`."""
    for rank in fullest_ranks(setup):
        yield _memory_of(setup, rank)


def layers_leaving(setup: TrainingSetup, machine: Machine) -> tuple[int, ...]:
    """How many layers of a unit may leave at once: as few as are worth it, and so many that no forward waits for
    copies, which begin when its first layer has run."""
    enough = _FEW_LAYERS
    rows = stage_rows(setup, machine)
    for layers, moved, (forwards, _, _) in zip(setup.layers_per_stage, moved_bytes(setup), rows, strict=True):
        for size, forward in zip(moved, forwards, strict=True):
            copying = size / machine.device.host_bandwidth
            if copying > forward:
                enough = max(enough, ceil(layers - (layers - 1) * forward / copying))
    return tuple(dict.fromkeys((_FEW_LAYERS, enough)))


@lru_cache(maxsize=1 << 14)
def _memory_of(setup: TrainingSetup, rank: int) -> Memory:
    share = 0.0 if setup.moves_parts else setup.offloads
    sizes = setup.but(offloads=0.0) if share else setup  # sizes of units do not depend on the share
    return memory_of_order(sizes, _in_flight(setup, rank, share))


def host_in_flight(setup: TrainingSetup) -> float:
    """The most that one of `fullest_ranks` has in the memory of its host, where whole units move."""
    orders = (_in_flight(setup, rank, setup.offloads) for rank in fullest_ranks(setup))
    return max(host_bytes(setup, order.given) for order in orders)


def _in_flight(setup: TrainingSetup, rank: int, share: float) -> RankOrder:
    """The actions of a rank until memory is fullest: a full pipeline holds few micro-batches, `breadth-first` all."""
    few = 2 * ceil(setup.pipeline_parallel / len(setup.segments)) + 2
    count = setup.num_microbatches if setup.family == "breadth-first" else min(setup.num_microbatches, few)
    shape = Shape(setup.placement, count, len(setup.segments))
    return _order(setup.family, shape, rank, share, setup.has_pairs, setup.layers_leaving)


@lru_cache(maxsize=1 << 16)
def fits(setup: TrainingSetup, limit: float) -> bool:
    """Whether the ranks that hold most stay below a limit in bytes."""
    return all(memory.total <= limit for memory in memory_in_flight(setup))


@lru_cache(maxsize=1 << 16)
def fitted(setup: TrainingSetup, budget: MemoryBudget, moves: Moves) -> TrainingSetup | None:
    """The set-up with the least of its activations on the host so that it fits; None if nothing helps. Whole layers
    move, all but one at most, and sixteenths of all else."""
    stays = setup.but(layers_leaving=0)  # where nothing moves, no layers leave
    if fits(stays, budget.device):
        return stays
    if not budget.host:
        return None
    parts = most = SHARES
    if moves is Moves.LAYERS:
        parts = setup.model.num_layers
        most = parts - 1

    # Megatron refuses graphs of layers that move as a whole.
    replays = setup.replays_layers and moves is not Moves.LAYERS

    def moving(number: int) -> TrainingSetup:
        return setup.but(offloads=number / parts, moves=moves, replays_layers=replays) if number else stays

    def excess(rank: int, number: int) -> float:
        return _memory_of(moving(number), rank).total - budget.device

    ranks = fullest_ranks(setup)
    if any(excess(rank, 0) > 0 and excess(rank, most) > 0 for rank in ranks):
        return None  # without a look at what others need
    least = 0  # that ranks so far need
    for rank in ranks:
        found = _first_without(partial(excess, rank), least, most)
        if found is None:
            return None
        least = found
    return moving(least)


def _first_without(excess: Callable[[int], float], first: int, last: int) -> int | None:
    """The first number without an excess, which falls about evenly; None if even the last has some."""
    at_first = excess(first)
    if at_first <= 0:
        return first
    at_last = excess(last) if last > first else at_first
    if at_last > 0:
        return None
    while last - first > 1:
        share = at_first / (at_first - at_last)
        guess = min(max(first + ceil(share * (last - first)), first + 1), last - 1)
        at_guess = excess(guess)
        if at_guess > 0:
            first = guess
            at_first = at_guess
        else:
            last = guess
            at_last = at_guess
    return last


@lru_cache(maxsize=1024)
def _order(family: str, shape: Shape, rank: int, offloads: float, has_pairs: bool, layers_leaving: int) -> RankOrder:
    clock = clock_of(family, shape, has_pairs)
    order = clock.order(rank)
    paired = clock.pairs_in(order)
    if offloads:
        by_layer = layers_leaving > 0
        order = with_moves(order, units_to_move(order, offloads, paired, by_layer), paired, by_layer)
    return RankOrder(shape.placement, rank, order, paired, layers_leaving)
