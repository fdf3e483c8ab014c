"""Packs sequences into units of limited length: long sequences are cut, short ones share a unit.

The chunks of ChunkFlow (arXiv 2503.02356, section 4.1), made for all replicas of a model at once.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from math import ceil

from .lengths import even


@dataclass(frozen=True)
class Pack:
    """A micro-batch: sequences, by their numbers, one after the other, cut into segments of `lengths` tokens.

    Only the first sequence may be in more than one segment, unless packs were given equal numbers of segments. The last
    segment is padded.
    """

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]


def work_by_flops(per_token: int, per_pair: int) -> Callable[[int], float]:
    """The FLOPs of a sequence by its length, for `packs_of_step`."""
    return lambda length: per_token * length + per_pair * length**2 / 2


def packs_of_step(
    lengths: Sequence[int],
    most: int,
    multiple_of: int = 1,
    replicas: int = 1,
    work: Callable[[int], float] = float,
    equal_counts: bool = False,
) -> list[list[Pack]]:
    """The micro-batches of each replica, from sequences of `lengths` tokens, in units of at most `most` tokens.

    `most` is a multiple of `multiple_of`, and so is every unit. Replicas get about equal sums of `work(length)`, and at
    least one micro-batch each; with `equal_counts`, for collectives between them, they have equal numbers of segments.
    The longest micro-batches come in the middle of a step, since stages wait for one another at its ends.
    """
    packs = _packs(lengths, most, multiple_of)
    work_of = {pack: sum(work(lengths[number]) for number in pack.sequences) for pack in packs}
    if equal_counts:
        shares = _shares_of_rounds(packs, replicas, work_of, multiple_of)
    else:
        shares = _shares_by_work(packs, replicas, work_of, multiple_of)
    return [_longest_in_the_middle(share) for share in shares]


def _shares_by_work(
    packs: Sequence[Pack], replicas: int, work_of: Mapping[Pack, float], multiple_of: int
) -> list[list[Pack]]:
    """The packs of each replica, in descending order of work: each goes where there is least."""
    shares: list[list[Pack]] = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    for pack in sorted(packs, key=work_of.__getitem__, reverse=True):
        least_loaded = min(range(replicas), key=loads.__getitem__)
        shares[least_loaded].append(pack)
        loads[least_loaded] += work_of[pack]
    return [share or [_empty(multiple_of)] for share in shares]


def _shares_of_rounds(
    packs: Sequence[Pack], replicas: int, work_of: Mapping[Pack, float], multiple_of: int
) -> list[list[Pack]]:
    """The packs of each replica, dealt in rounds of one for each: the most work of a round goes where there is least so
    far. The packs of a round get equal numbers of segments."""
    descending = sorted(packs, key=lambda pack: (len(pack.lengths), work_of[pack]), reverse=True)
    shares: list[list[Pack]] = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    for packs_of_round in batched(descending, replicas):
        by_work = sorted(packs_of_round, key=work_of.__getitem__, reverse=True)
        by_work += [_empty(multiple_of)] * (replicas - len(by_work))
        least_loaded_first = sorted(range(replicas), key=loads.__getitem__)
        equal = _with_equal_counts(by_work, multiple_of)
        for replica, pack, equal_pack in zip(least_loaded_first, by_work, equal, strict=True):
            shares[replica].append(equal_pack)
            loads[replica] += work_of.get(pack, 0.0)
    return [share or [_empty(multiple_of)] for share in shares]


def _empty(multiple_of: int) -> Pack:
    """A micro-batch of padding alone."""
    return Pack((), (multiple_of,))


def _longest_in_the_middle(descending: list[Pack]) -> list[Pack]:
    """Packs, given from the longest to the shortest, with the longest in the middle: from the ends inwards they are
    dealt in turn to both sides."""
    rising: list[Pack] = []
    falling: deque[Pack] = deque()
    for number, pack in enumerate(reversed(descending)):
        if number % 2 == 0:
            rising.append(pack)
        else:
            falling.appendleft(pack)
    return [*rising, *falling]


def _packs(lengths: Sequence[int], most: int, multiple_of: int) -> list[Pack]:
    """Best fit: sequences in descending order of length, each where the room left is smallest."""
    members: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room in the last unit, number of the pack), ascending
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        place = bisect_left(room, (lengths[number], -1))
        if lengths[number] > most or place == len(room):
            members.append([number])
            insort(room, (-lengths[number] % most, len(members) - 1))
        else:
            left, pack = room.pop(place)
            members[pack].append(number)
            insort(room, (left - lengths[number], pack))
    packs = []
    for numbers in members:
        # The last unit has from 1 to `most` tokens, before it is rounded up.
        num_full, rest = divmod(sum(lengths[number] for number in numbers) - 1, most)
        last_unit = multiple_of * ceil((rest + 1) / multiple_of)
        packs.append(Pack(tuple(numbers), (most,) * num_full + (last_unit,)))
    return packs


def _with_equal_counts(packs: Sequence[Pack], multiple_of: int) -> list[Pack]:
    """The packs, each with as many segments as the longest has."""
    most = max(len(pack.lengths) for pack in packs)
    equal = []
    for pack in packs:
        if len(pack.lengths) < most:
            num_tokens = max(sum(pack.lengths), most * multiple_of)
            pack = Pack(pack.sequences, even(num_tokens, most, multiple_of))
        equal.append(pack)
    return equal
