"""Sentences name flags; those that a program reads name its keywords."""

import pytest

from megatron.seq1f1b.arguments import keywords_in_errors, parse_options
from megatron.seq1f1b.install import install
from megatron.seq1f1b.model.packed_documents import KEEP_APART


@pytest.mark.parametrize(
    "sentence, keywords",
    [
        (
            "--sequence-splits 20 leaves empty segments: --seq-length 16 has only 16",
            "sequence_splits 20 leaves empty segments: seq_length 16 has only 16",
        ),
        ("--fp8-format is untested - really; drop --sequence-splits", "fp8 is untested - really; drop sequence_splits"),
        (
            f"{KEEP_APART}, or drop --sequence-splits",
            "for packed documents give keep_documents_apart, or drop sequence_splits",
        ),
    ],
)
def test_flags_are_keywords_in_a_program(sentence, keywords):
    with pytest.raises(ValueError) as error, keywords_in_errors():
        raise ValueError(sentence)
    assert str(error.value) == keywords


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"sequence_splits": "x"}, "^argument sequence_splits/.*: 'x' is neither a number of segments nor 'auto'$"),
        ({"pipeline_schedule": "2f2b"}, "^argument pipeline_schedule: invalid choice: '2f2b'"),
        ({"sequence_split": 2}, "^unrecognized arguments: sequence_split 2 .did you mean sequence_splits"),
    ],
    ids=str,
)
def test_wrong_options_of_a_program_are_keywords(options, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        parse_options(options)
    assert "--" not in str(error.value)
    with pytest.raises(ValueError, match=sentence):
        install(**options)
