"""Both ends of a channel agree on the messages, or a sentence names those that differ."""

import pytest

from megatron.seq1f1b.rehearsal.recorder import Message, Traffic, mismatches


def message(source=0, destination=1, shape=(4, 1, 8), dtype="bfloat16", moment="0F0.0"):
    return Message(source, destination, "forward", shape, dtype, 64, moment)


def test_ends_that_agree():
    both = [message(), message(shape=(2, 1, 8))]
    assert mismatches([Traffic(both, []), Traffic([], both)]) == []


def test_another_order_is_found():
    short = message(shape=(2, 1, 8))
    (sentence,) = mismatches([Traffic([message(), short], []), Traffic([], [short, message()])])
    assert "message 0 from rank 0 to rank 1 (forward) is sent as bfloat16 [4, 1, 8] " in sentence
    assert "in the forward of stage 0 for segment 0 of micro-batch 0, but received as bfloat16 [2, 1, 8] " in sentence


def test_another_type_is_found():
    (sentence,) = mismatches([Traffic([message()], []), Traffic([], [message(dtype="float32")])])
    assert "float32" in sentence


@pytest.mark.parametrize(
    "sent, received, numbers, first",
    [
        ([message(), message(moment="0F1.0")], [message()], "2 messages are sent", "micro-batch 1"),
        ([], [message()], "0 messages are sent", "micro-batch 0"),
    ],
    ids=["nobody receives", "nobody serves"],
)
def test_a_message_without_a_partner_is_found(sent, received, numbers, first):
    (sentence,) = mismatches([Traffic(sent, []), Traffic([], received)])
    assert sentence == (
        f"{numbers} from rank 0 to rank 1 (forward), but 1 received; the first without a partner is bfloat16 "
        f"[4, 1, 8] in the forward of stage 0 for segment 0 of {first}"
    )
