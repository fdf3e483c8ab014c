"""The arguments of a call of the model, one segment at a time."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.seq1f1b.model import Segment
from megatron.seq1f1b.runtime.model_calls.call_arguments import (
    Arguments,
    CutArguments,
    bounds_of,
    narrowed,
    require_size,
    size_of,
)

LENGTH = 8
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH)
MASK = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
SEGMENTS = [Segment(0, index, *bounds, LENGTH) for index, bounds in enumerate([(0, 5), (5, 8)])]


def arguments(*positional, **named):
    names = ("input_ids", "position_ids", "attention_mask")
    return Arguments(positional, named, names[: len(positional)])


def parts(given, follows_segments=False, segments=SEGMENTS):
    cut = CutArguments(given, 2, LENGTH, narrowed, follows_segments)
    return [cut.of(segment) for segment in segments]


def test_segments_make_up_what_counts_tokens():
    first, second = parts(arguments(TOKENS, None, MASK, loss_mask=TOKENS.float()))
    for read in (lambda part: part.positional[0], lambda part: part.named["loss_mask"]):
        assert torch.equal(torch.cat([read(first), read(second)], dim=1).long(), TOKENS)
        assert read(second).is_contiguous()
    assert second.positional[1] is None and second.positional[2].shape == (2, 1, 3, 3)


def test_all_else_passes_through():
    """Also tensors of as many rows as a sequence has tokens, and nested ones."""
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(8)], layout=torch.jagged)
    given = {"name": "batch", "rows": torch.ones(LENGTH, 5), "ratio": 0.5, "nested": nested}
    for part in parts(arguments(TOKENS, **given)):
        assert part.named.keys() == given.keys()
        assert all(part.named[name] is value for name, value in given.items())


def test_what_a_model_fills_in_reaches_its_program():
    """A program that takes the weight of the head from the model hands it a dict (SkyRL's fused head)."""
    context = {}
    notes = {"sizes": [1, 2], "context": context}
    for part in parts(arguments(TOKENS, output_processor_context=context, notes=notes)):
        assert part.named["output_processor_context"] is context
        assert part.named["notes"] is notes


def test_structures_are_cut_within():
    first, second = parts(arguments(TOKENS, extra={"pair": (TOKENS + 1, "text")}))
    assert torch.equal(second.named["extra"]["pair"][0], TOKENS[:, 5:] + 1)
    assert first.named["extra"]["pair"][1] == "text"


def test_activations_with_sequences_in_columns():
    _, second = parts(arguments(torch.arange(LENGTH * 2 * 4).view(LENGTH, 2, 4)))
    assert second.positional[0].shape == (3, 2, 4)


def test_layers_that_follow_segments_get_no_masks():
    packed = PackedSeqParams(qkv_format="thd")
    for part in parts(arguments(TOKENS, None, MASK, packed_seq_params=packed), follows_segments=True):
        assert part.positional[2] is None and part.named == {"packed_seq_params": None}


def test_a_whole_sequence_is_handed_on_as_it_is():
    (part,) = parts(arguments(TOKENS, None, MASK), segments=[Segment(0, 0, 0, LENGTH, LENGTH)])
    assert part.positional[0] is TOKENS and part.positional[2] is MASK


def packed(bounds, padded=None):
    return PackedSeqParams("thd", torch.tensor(bounds), None, padded and torch.tensor(padded))


@pytest.mark.parametrize(
    "given, size",
    [
        (arguments(TOKENS), (2, 8)),
        (arguments(TOKENS[:1], packed_seq_params=packed([0, 3, 7])), (1, 8)),
        (arguments(torch.nested.nested_tensor([torch.ones(3)]), packed_seq_params=packed([0, 3, 7])), (1, 7)),
        (arguments(None, packed_seq_params=packed([0, 3, 7], [0, 4, 8])), (1, 8)),
        (arguments(None, labels=TOKENS), (2, 8)),
        (arguments(None, None, MASK, decoder_input=torch.ones(LENGTH, 2, 4)), (2, 8)),
        (arguments(None, None, None, flag=True, scale=torch.ones(())), None),
    ],
    ids=["tokens", "a pack", "nested", "no tokens", "labels", "embeddings beside a mask", "no data"],
)
def test_the_size_of_a_call(given, size):
    assert size_of(given) == size


def test_embeddings_as_wide_as_the_sequence_are_cut_by_tokens():
    embedded = torch.arange(2.0 * LENGTH * LENGTH).view(LENGTH, 2, LENGTH)
    first, second = parts(Arguments((), {"decoder_input": embedded}, ()))
    assert torch.equal(torch.cat([first.named["decoder_input"], second.named["decoder_input"]]), embedded)


@pytest.mark.parametrize("bounds", [[0, 3, 7], [0, 3, 7, 7, 7], [0, 3, 7, -1, -1]])
def test_entries_behind_the_end_of_a_pack_have_no_meaning(bounds):
    assert sorted({*bounds_of(packed(bounds))}) == [0, 3, 7]


def test_data_of_another_size_than_the_step_is_called_for():
    require_size(arguments(TOKENS), 2, LENGTH, 0)
    require_size(arguments(torch.ones(LENGTH, 2, 4)), 2, LENGTH, 0)
    words = "micro-batch 3 calls its model with 2 sequences of 8 tokens, but segments are cut from 2 of 9, as micro_"
    with pytest.raises(ValueError, match=words):
        require_size(arguments(TOKENS), 2, 9, 3)
