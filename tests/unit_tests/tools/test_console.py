"""The console command `seq1f1b` beside what a command does: packages that are missing, pipes that close."""

import subprocess
import sys

import pytest

from megatron.seq1f1b import commands
from support.patience import patient


@pytest.mark.parametrize(
    "package, requirement", [("matplotlib", "megatron-seq1f1b[report]"), ("torch", "megatron-seq1f1b")]
)
def test_a_missing_package_is_one_sentence(monkeypatch, capsys, package, requirement):
    def missing(*_):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(commands, "import_module", missing)
    assert commands.main(["plot"]) == 2
    sentence = f"error: the package {package} is missing; pip install '{requirement}' brings it.\n"
    assert capsys.readouterr().err == sentence


def test_a_reader_that_closes_the_pipe_sees_no_error():
    """As in `seq1f1b check FILE | head`."""
    program = (
        "import sys\nfrom megatron.seq1f1b import commands\n"
        "commands.import_module = lambda *_: type('Chatty', (), {'main': staticmethod(lambda _: print('x' * 10**6))})\n"
        "sys.exit(commands.main(['check']))"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    command.stdout.read(1)
    command.stdout.close()
    assert command.wait(timeout=patient(120)) == 1
    assert command.stderr.read() == ""
