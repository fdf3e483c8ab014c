"""Packs sequences into units of limited length: long sequences are cut, short ones share a unit.

The chunks of ChunkFlow (arXiv 2503.02356, section 4.1), made for all replicas of a model at once.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import batched

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
    packs.sort(key=lambda pack: (len(pack.lengths) if equal_counts else 0, work_of[pack]), reverse=True)
    shares: list[list[Pack]] = [[] for _ in range(replicas)]
    loads = [0.0] * replicas
    # Give each pack to the replica with the least work; with `equal_counts`, in rounds of one pack per replica.
    for round_ in batched(packs, replicas if equal_counts else 1):
        free = sorted(range(replicas), key=loads.__getitem__)
        for pack, replica in zip(sorted(round_, key=work_of.__getitem__, reverse=True), free, strict=False):
            shares[replica].append(pack)
            loads[replica] += work_of[pack]
        for replica in free[len(round_) :] if equal_counts else ():
            shares[replica].append(Pack((), (multiple_of,)))
    filled = [share or [Pack((), (multiple_of,))] for share in shares]
    if equal_counts:
        rounds = [_with_equal_counts(round_, multiple_of) for round_ in zip(*filled, strict=True)]
        filled = [list(share) for share in zip(*rounds, strict=True)]
    return [_longest_in_the_middle(share) for share in filled]


def _longest_in_the_middle(descending: list[Pack]) -> list[Pack]:
    """Packs from the longest to the shortest, dealt in turn to both sides of the middle."""
    rising = descending[::-2]
    falling = descending[-2::-2][::-1]
    return rising + falling


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
        whole, last = divmod(sum(lengths[number] for number in numbers) - 1, most)
        packs.append(Pack(tuple(numbers), (most,) * whole + (-(-(last + 1) // multiple_of) * multiple_of,)))
    return packs


def _with_equal_counts(packs: Sequence[Pack], multiple_of: int) -> list[Pack]:
    """The packs, each with as many segments as the longest has."""
    most = max(len(pack.lengths) for pack in packs)
    cuts = (even(max(sum(pack.lengths), most * multiple_of), most, multiple_of) for pack in packs)
    return [
        pack if len(pack.lengths) == most else Pack(pack.sequences, cut) for pack, cut in zip(packs, cuts, strict=True)
    ]
