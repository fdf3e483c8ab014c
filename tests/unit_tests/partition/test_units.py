"""Units of a step: every token once, none too long, nothing cut but what is longer than a unit, equal work."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.seq1f1b.partition import packs_of_step

from ..schedule.strategies import fixed

lengths = st.lists(st.integers(1, 100), max_size=60)


@fixed
@given(lengths, st.integers(1, 12), st.sampled_from([1, 2, 8]), st.integers(1, 5), st.booleans())
def test_every_sequence_is_in_one_pack_and_no_unit_is_too_long(lengths, size, multiple, replicas, equal_counts):
    most = size * multiple
    shares = packs_of_step(lengths, most, multiple, replicas, equal_counts=equal_counts)
    packs = [pack for share in shares for pack in share]
    assert sorted(number for pack in packs for number in pack.sequences) == list(range(len(lengths)))
    for pack in packs:
        assert all(0 < length <= most and length % multiple == 0 for length in pack.lengths)
        used = sum(lengths[number] for number in pack.sequences)
        assert used <= sum(pack.lengths)
        if not equal_counts:  # no token more than makes the last unit a multiple, and one long sequence at most
            assert not pack.sequences or sum(pack.lengths) - used < multiple
            assert set(pack.lengths[:-1]) <= {most}
            assert all(lengths[number] <= most for number in pack.sequences[1:])
    assert all(shares) and (lengths or len(packs) == replicas)
    if not equal_counts:
        short = [pack.sequences for pack in packs if len(pack.lengths) == 1 and pack.sequences]
        least = sorted(sum(lengths[number] for number in sequences) for sequences in short)[:2]
        assert len(least) < 2 or sum(least) > most, "two packs would fit into one"
    else:
        assert len({tuple(len(pack.lengths) for pack in share) for share in shares}) == 1


def test_replicas_get_equal_work():
    lengths = [1000 + 37 * number % 500 for number in range(200)] + [16_000, 9_000]

    def work(length):
        return length * (1 + length / 4000)

    shares = packs_of_step(lengths, 2048, replicas=8, work=work)
    loads = [sum(work(lengths[number]) for pack in share for number in pack.sequences) for share in shares]
    longest = work(16_000)
    assert max(loads) <= max(longest, sum(loads) / 8 * 1.02)
    for share in shares:  # what takes most is in the middle
        of_packs = [sum(work(lengths[number]) for number in pack.sequences) for pack in share]
        middle = of_packs.index(max(of_packs))
        assert abs(middle - len(share) / 2) <= 1
        assert of_packs == sorted(of_packs[: middle + 1]) + sorted(of_packs[middle + 1 :], reverse=True)
