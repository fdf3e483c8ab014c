"""The console command `seq1f1b`, beside what each of its commands does."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from megatron.seq1f1b import commands
from support.patience import patient


def test_what_is_no_command_ends_with_a_sentence(capsys):
    for words, sentence in (
        (["draw"], "error: seq1f1b has no command 'draw'; it has plot, "),
        (["plt"], "error: seq1f1b has no command 'plt'; did you mean plot?\n"),
        ([], "usage: "),
    ):
        assert commands.main(words) == 2
        assert capsys.readouterr().err.startswith(sentence)


def test_help_and_the_version(capsys, monkeypatch):
    assert commands.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name}" in printed and what in printed for name, (_, what) in commands.COMMANDS.items())
    monkeypatch.setattr(sys, "argv", ["seq1f1b"])
    with pytest.raises(SystemExit, match="0"):
        commands.main(["check", "--help"])
    assert "usage: seq1f1b check" in capsys.readouterr().out
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out == f"seq1f1b {version('megatron-seq1f1b')}\n"


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
