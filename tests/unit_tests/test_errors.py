"""A mistake has one sentence, which names parameters as its reader set them."""

import ast
import re
from pathlib import Path

import pytest

from megatron.seq1f1b import arguments
from megatron.seq1f1b.arguments import Naming, run_of_arguments
from megatron.seq1f1b.arguments.flags import parse_options
from megatron.seq1f1b.errors import ParameterError
from megatron.seq1f1b.model.masks import KEEP_APART
from megatron.seq1f1b.planning.run_costs import RunCosts
from unit_tests.arguments.parsed import parsed

ROOT = Path(__file__).parents[2] / "megatron" / "seq1f1b"
PURE = ("schedule", "partition", "planning")


def test_parameters_stand_with_a_value_or_alone():
    error = ParameterError(
        "{num_segments} of {lengths_file} {0}; use {strategy:even} or drop {num_segments.name}",
        "{is} a brace {0}",
        num_segments=0,
        lengths_file=Path("{curly}"),
    )
    assert str(error) == (
        "num_segments=0 of lengths_file={curly} {is} a brace {0}; use strategy=even or drop num_segments"
    )
    assert Naming.FLAGS.sentence(error) == (
        "--sequence-splits 0 of --sequence-split-file {curly} {is} a brace {0}; use --sequence-split-strategy even or "
        "drop --sequence-splits"
    )
    assert Naming.KEYWORDS.sentence(error) == (
        "sequence_splits=0 of sequence_split_file={curly} {is} a brace {0}; use sequence_split_strategy=even or drop "
        "sequence_splits"
    )


@pytest.mark.parametrize(
    "options, settings, flags, keywords",
    [
        (
            {"sequence_splits": 20000},
            {},
            "--sequence-splits 20000 leaves empty segments: --seq-length 16384 has only 16384 pieces of 1 token(s); "
            "use at most 16384 segments",
            "sequence_splits=20000 leaves empty segments: seq_length=16384 has only 16384 pieces of 1 token(s); "
            "use at most 16384 segments",
        ),
        (
            {"sequence_splits": 4, "sequence_split_strategy": "profile"},
            {},
            "--sequence-split-strategy profile needs --sequence-split-profile; measure one with "
            "`seq1f1b profile`, or use --sequence-split-strategy balanced",
            "sequence_split_strategy=profile needs sequence_split_profile; measure one with "
            "`seq1f1b profile`, or use sequence_split_strategy=balanced",
        ),
        (
            {"sequence_splits": 4},
            {"qk_clip": True},
            "--qk-clip needs the largest logit of each head, which takes another product of all queries and keys; "
            "drop it",
            "qk_clip needs the largest logit of each head, which takes another product of all queries and keys; "
            "drop it",
        ),
    ],
    ids=["segments", "profile", "unsupported"],
)
def test_flags_on_a_command_line_are_keywords_in_a_program(options, settings, flags, keywords):
    run = run_of_arguments(parsed(**settings))
    for naming, sentence in ((Naming.FLAGS, flags), (Naming.KEYWORDS, keywords)):
        with pytest.raises(ValueError) as error:
            ours = parse_options({"device": "cuda"} | options)
            arguments.pipeline_config(ours, run, RunCosts(ours, run), naming)
        assert str(error.value) == sentence


def test_later_cuts_keep_the_names():
    flags, run = parse_options({"sequence_splits": 4}), run_of_arguments(parsed())
    config = arguments.pipeline_config(flags, run, RunCosts(flags, run), Naming.KEYWORDS)
    with pytest.raises(ValueError, match="^sequence_splits=4 leaves empty segments: seq_length=3 has only 3 pieces"):
        config.cut(3)


def test_sentences_of_a_running_step_have_keywords_too():
    with (
        pytest.raises(ValueError, match="^fp8 is untested - really; drop sequence_splits$"),
        Naming.KEYWORDS.in_errors(),
    ):
        raise ValueError("--fp8-format is untested - really; drop --sequence-splits")
    with (
        pytest.raises(ValueError, match="^for packed documents give keep_documents_apart, or drop sequence_splits$"),
        Naming.KEYWORDS.in_errors(),
    ):
        raise ValueError(f"{KEEP_APART}, or drop --sequence-splits")
    own = ValueError("a sentence of the program's own")
    with pytest.raises(ValueError) as error, Naming.KEYWORDS.in_errors():
        raise own
    assert error.value is own


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"sequence_splits": "x"}, "^sequence_splits='x': "),
        ({"pipeline_schedule": "2f2b"}, "^pipeline_schedule='2f2b': invalid choice: '2f2b'"),
        ({"segments": 2}, "^segments is not a keyword of megatron.seq1f1b.install; there are pipeline_schedule, "),
    ],
    ids=str,
)
def test_wrong_options_of_a_program_are_keywords(options, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        parse_options(options)
    assert "--" not in str(error.value)


def test_no_pure_room_writes_a_flag_into_an_error():
    for path in (path for room in PURE for path in (ROOT / room).rglob("*.py")):
        raised = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
        texts = [node.value for each in raised for node in ast.walk(each) if isinstance(node, ast.Constant)]
        assert not [text for text in texts if re.search(r"(?<![\w-])--[a-z]", str(text))], path
