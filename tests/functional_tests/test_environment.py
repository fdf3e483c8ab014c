"""SEQ1F1B in the environment: programs, and the processes that they start, run on segments without a change."""

import os
import re
import subprocess
import sys

import pytest

from megatron.seq1f1b.commands import main
from megatron.seq1f1b.launch.environment import keywords
from support.launch import ROOT, python_path
from support.patience import patient

FLAGS = "--segment-tokens 16 --device cpu"
# Python reads .pth files in site-packages at its start; here, in the first lines.
SHOW = """
import site, sys
{first}
site.addsitedir(sys.argv[1])
def show():
    from megatron.core.pipeline_parallel import get_forward_backward_func
    try:
        print("runs", type(get_forward_backward_func()).__name__)
    except AssertionError:  # Megatron's own wants process groups
        print("runs Megatron's")
if __name__ == "__main__":
    show()
    {last}
"""


def run(folder, first="", last="", **environment) -> subprocess.CompletedProcess:
    script = folder / "script.py"
    script.write_text(SHOW.format(first=first, last=last))
    clean = {name: value for name, value in os.environ.items() if name != "SEQ1F1B"}
    command = [sys.executable, "-W", "ignore", str(script), str(folder)]
    environment = clean | {"PYTHONPATH": python_path(ROOT)} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of packages after `seq1f1b enable`."""
    made = tmp_path_factory.mktemp("site-packages")
    assert main(["enable", "--folder", str(made)]) == 0
    return made


def test_the_variable_reaches_a_program_and_its_workers(folder):
    spawned = "import multiprocessing; multiprocessing.get_context('spawn').Process(target=show).start()"
    done = run(folder, last=spawned, SEQ1F1B=FLAGS)
    assert done.stdout.count("runs ProgramExecutor") == 2, done.stderr
    log = done.stdout + done.stderr
    assert log.count(f"runs Megatron's steps by SEQ1F1B='{FLAGS}'") == 2, log


def test_a_process_that_has_imported_megatron_runs_on_segments(folder):
    done = run(folder, first="import megatron.core", SEQ1F1B=FLAGS)
    assert done.stdout.endswith("runs ProgramExecutor\n"), done.stderr


def test_without_the_variable_nothing_is_imported(folder):
    done = run(folder, last="print([name for name in sys.modules if name.startswith('megatron.seq1f1b')])")
    assert done.stdout == "runs Megatron's\n[]\n", done.stderr


def test_a_program_that_installs_by_itself_decides(folder):
    """Else the two would differ, which install refuses."""
    own = "import megatron.seq1f1b; megatron.seq1f1b.install(segment_tokens=8, device='cpu')"
    done = run(folder, first="site.addsitedir(sys.argv[1])\n" + own, SEQ1F1B=FLAGS)
    assert done.stdout.endswith("runs ProgramExecutor\n"), done.stderr
    assert "by SEQ1F1B" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("--segment-token 16", "SEQ1F1B='--segment-token 16' in the environment: .*--segment-token"),
        ("8192", "SEQ1F1B='8192' .* must hold flags, such as '--segment-tokens 8192'"),
        ("--segment-tokens=16 8", "SEQ1F1B='--segment-tokens=16 8' .* must hold flags"),
    ],
)
def test_a_mistake_in_the_variable_ends_the_import(folder, text, sentence):
    done = run(folder, SEQ1F1B=text)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and re.match(f"ValueError: {sentence}", last), done.stderr


def test_flags_become_keywords():
    given = "--segment-tokens 8192 --keep-logits --pipeline-schedule=zb-h1 --pipeline-trace-iterations 3 4"
    assert keywords(given) == {
        "segment_tokens": ["8192"],
        "keep_logits": True,
        "pipeline_schedule": "zb-h1",
        "pipeline_trace_iterations": ["3", "4"],
    }


def test_the_file_is_removed_again(tmp_path):
    main(["enable", "--folder", str(tmp_path)])
    main(["enable", "--folder", str(tmp_path), "--remove"])
    assert list(tmp_path.iterdir()) == []
