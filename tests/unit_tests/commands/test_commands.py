"""The console command `seq1f1b`, beside what each of its commands does."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import shtab

from megatron.seq1f1b import commands
from megatron.seq1f1b.commands.completion import parser_of_all
from support.patience import patient


def test_what_is_no_command_ends_with_a_sentence(capsys):
    for words, sentence in (
        (["draw"], "error: seq1f1b has no command 'draw'; it has plot, "),
        (["plt"], "error: seq1f1b has no command 'plt'; did you mean plot?\n"),
        ([], "usage: "),
    ):
        assert commands.main(words) == 2
        assert capsys.readouterr().err.startswith(sentence)


def test_a_flag_has_one_spelling(capsys):
    assert commands.main(["plot", "--sequence-split", "3"]) == 2
    assert "did you mean --sequence-splits?" in capsys.readouterr().err


def test_help_and_the_version(capsys, monkeypatch):
    assert commands.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert commands.main(["help"]) == 0 and capsys.readouterr().out == printed
    assert all(f"  {name}" in printed and what in printed for name, (_, what) in commands.COMMANDS.items())
    monkeypatch.setattr(sys, "argv", ["seq1f1b"])
    with pytest.raises(SystemExit, match="0"):
        commands.main(["check", "--help"])
    of_check = capsys.readouterr().out
    assert "usage: seq1f1b check" in of_check
    with pytest.raises(SystemExit, match="0"):
        commands.main(["help", "check"])
    assert capsys.readouterr().out == of_check
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out == f"seq1f1b {version('megatron-seq1f1b')}\n"


@pytest.mark.parametrize(
    "words, streams, code, printed",
    [
        ("--help", "> /dev/full", 2, "error: the output: No space left on device.\n"),
        ("--version", ">&-", 0, ""),
        ("check none.csv", "<&- >&-", 2, "error: none.csv: No such file or directory.\n"),
        ("check none.csv", "<&- >&- 2>&-", 2, ""),
    ],
)
def test_an_output_that_is_closed_or_full_leaves_no_traceback(words, streams, code, printed):
    program = f"from megatron.seq1f1b.commands import main; raise SystemExit(main({words.split()!r}))"
    shell = ["bash", "-c", f'"{sys.executable}" -c "{program}" {streams}']
    done = subprocess.run(shell, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, printed)


# Words that are typed so far, the last perhaps in part -> what bash offers.
COMPLETED = {
    "pl": "plot plan plan-split",
    "plan --mod": "--model",
    "plan --model llama3-": "llama3-8b llama3-70b llama3-405b",
    "gain-map --machine h1": "h100-80gb",
    "train-time --critical-batch-law o": "olmo",
    "plot --pipeline-schedule zb": "zb-h1",
    "plot --timeline step": "step.json",
    "check sc": "schedule.csv",
    "compare ru": "runs",
    "preprocess --on-error s": "stop skip",
}


def test_the_shell_completes_commands_flags_and_values(capsys, tmp_path):
    assert commands.main(["--print-completion", "bash"]) == 0
    lines = [capsys.readouterr().out]
    for words in COMPLETED:
        words = ["seq1f1b", *words.split()]
        lines += [f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=()"]
        lines += ["_shtab_seq1f1b; echo ${COMPREPLY[*]}"]
    for name in ("step.json", "schedule.csv"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    done = subprocess.run(["bash"], input="\n".join(lines), cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    assert dict(zip(COMPLETED, done.stdout.splitlines(), strict=True)) == COMPLETED


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["ksh"], "error: argument bash|zsh|tcsh|fish|powershell: invalid choice: 'ksh' (choose from "),
        ([], "error: the following arguments are required: bash|zsh|tcsh|fish|powershell.\n"),
    ],
)
def test_a_shell_that_is_unknown_or_missing_is_a_sentence(words, sentence, capsys):
    assert commands.main(["--print-completion", *words]) == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_every_path_is_completed_and_every_shell_has_its_text():
    parser = parser_of_all()
    of_commands = next(action.choices for action in parser._actions if action.dest == shtab.SUPPRESS)
    assert {*of_commands} == {*commands.COMMANDS}
    for name, command in of_commands.items():
        for action in command._actions:
            is_path = action.type is Path or getattr(action.type, "__name__", "") == "path_of"
            assert not is_path or hasattr(action, "complete"), (name, action.dest)
    for shell in ("bash", "zsh", "fish"):
        assert all(name in shtab.complete(parser, shell) for name in of_commands)


@pytest.mark.parametrize(
    "package, installed",
    [
        ("matplotlib", "matplotlib"),
        ("torch", "'.[train]' in the repository of this package"),
        ("megatron.training", "'.[train]' in the repository of this package"),
    ],
)
def test_a_missing_package_is_one_sentence(monkeypatch, capsys, package, installed):
    def missing(*_):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(commands, "import_module", missing)
    assert commands.main(["plot"]) == 2
    sentence = f"error: the package {package} is missing; pip install {installed} brings it.\n"
    assert capsys.readouterr().err == sentence


def test_a_reader_that_closes_the_pipe_sees_no_error():
    """As in `seq1f1b check FILE | head`."""
    program = (
        "import sys\nfrom megatron.seq1f1b import commands\n"
        "commands.import_module = lambda *_: type('Chatty', (), {'main': staticmethod(lambda _: print('x' * 10**6))})\n"
        "sys.exit(commands.main(['check']))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = subprocess.Popen([sys.executable, "-c", program], **pipes)
    command.stdout.read(1)
    command.stdout.close()
    assert command.wait(timeout=patient(120)) == 1 and command.stderr.read() == b""


PLAN_SPLIT = "import sys; from megatron.seq1f1b import commands; sys.exit(commands.main(['plan-split']))"


def test_an_output_without_space_ends_with_a_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PLAN_SPLIT], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the output: No space left on device.\n")
