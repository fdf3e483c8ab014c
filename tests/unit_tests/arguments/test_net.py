"""What ends a program is one sentence, with the traceback of what is not a plain mistake in a file."""

import re
import runpy
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron.seq1f1b.arguments import net, parse_options
from megatron.seq1f1b.arguments.net import Net, sentence_of


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Where tracebacks are written."""
    monkeypatch.chdir(tmp_path)


def raised(function, *arguments):
    try:
        function(*arguments)
    except BaseException as error:
        return error


MEGATRON = """
def validate_args(args):
    assert args.hidden_size % args.num_attention_heads == 0
"""


def load_checkpoint(args, error):
    raise error


ARGS = Namespace(hidden_size=65, num_attention_heads=4, load="/saved")
REMOTE = RuntimeError("ranks: [0]\nTraceback (most recent call last): (RANK 0)\n  File 1\nKeyError: 'gone'\n")


@pytest.mark.parametrize(
    "error, sentence",
    [
        (raised(load_checkpoint, ARGS, KeyError("args")), "loading the checkpoint in /saved failed: KeyError: 'args'"),
        (raised(load_checkpoint, ARGS, REMOTE), "loading the checkpoint in /saved failed: KeyError: 'gone'"),
        (raised(open, "/no/file"), "/no/file: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            raised(load_checkpoint, ARGS, OSError(28, "No space left")),
            "loading the checkpoint in /saved failed: No space",
        ),
        (raised(int, "many\n  lines"), "invalid literal for int() with base 10: 'many\\n lines'"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError("x " * 999), f"{'x ' * 200} ..."),
        (ModuleNotFoundError("no", name="datasets"), "the package datasets is missing; pip install"),
        (KeyboardInterrupt(), "interrupted"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_error_is_one_sentence(error, sentence):
    assert sentence_of(error).startswith(sentence) and "\n" not in sentence_of(error)


def test_a_failed_check_without_words_is_shown_with_its_flags(tmp_path):
    (tmp_path / "checks.py").write_text(MEGATRON)
    error = raised(runpy.run_path(tmp_path / "checks.py")["validate_args"], ARGS)
    assert sentence_of(error) == (
        "checking the flags failed: assert hidden_size % num_attention_heads == 0 "
        "(--hidden-size 65, --num-attention-heads 4) does not hold"
    )


def caught(error) -> int:
    """The code with which the program ends."""
    with pytest.raises(SystemExit) as end:
        Net().caught(type(error), error, error.__traceback__)
    return end.value.code


ERROR = raised(load_checkpoint, ARGS, KeyError("args"))


def test_the_sentence_names_the_file_of_the_traceback(tmp_path, monkeypatch, capfd):
    """But for a mistake that we find; a full disk does not hide the sentence."""
    caught(raised(parse_options, {"sequence_splitz": 4}))
    assert capfd.readouterr().err.count("\n") == 1 and not [*tmp_path.iterdir()]
    assert caught(ERROR) == 2
    printed = capfd.readouterr().err
    file = re.fullmatch(r"error: .* failed: KeyError: 'args'; the traceback is in (\S+)\.\n", printed)[1]
    assert "line" in Path(file).read_text() and Path(file).parent == tmp_path
    monkeypatch.setattr(net.tempfile, "NamedTemporaryFile", Mock(side_effect=OSError(28, "No space left on device")))
    caught(ERROR)
    ending = "KeyError: 'args'; the traceback is in no file, since none can be written.\n"
    assert capfd.readouterr().err.endswith(ending)


def test_after_the_first_step_a_traceback_is_printed(monkeypatch, capfd):
    monkeypatch.setattr(net, "_first_step_is_over", lambda: True)
    Net().caught(type(ERROR), ERROR, ERROR.__traceback__)
    assert capfd.readouterr().err.startswith("Traceback (most recent call last)")
