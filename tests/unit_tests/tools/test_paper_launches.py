"""The launchers in scripts/paper: the sizes of the authors as flags; logs of runs are read back into the tables."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.seq1f1b.commands.launch_flags import read_launch
from paper.launches import TABLES, launches, step_of
from paper.row import slug
from paper.seq1f1b_tables import throughput
from paper_launches import errors_of, print_predictions, slower_with_slices
from paper_tables import as_csv, with_logs
from support.files import write_files
from support.patience import patient

ROOT = Path(__file__).parents[3]
LAUNCHERS = sorted(path.stem for path in (ROOT / "scripts" / "paper").glob("*.sh") if path.stem != "run")
FAST = ("seq1f1b", "seq1f1b_7b", "seq1f1b_memory", "terapipe")


def test_every_table_has_its_launcher():
    assert sorted(TABLES) == LAUNCHERS
    assert {launch.row.label.split(",")[0] for launch in launches("seq1f1b")} == {"2.7B", "7B", "13B", "30B"}
    for name in LAUNCHERS:
        assert f'run_table {name} "$@"' in (ROOT / "scripts" / "paper" / f"{name}.sh").read_text()


@pytest.mark.parametrize("table", FAST)
def test_flags_have_the_sizes_of_the_row(table):
    logs = [launch.log for launch in launches(table)]
    assert len(logs) == len(set(logs))
    for launch in launches(table):
        setup, words = launch.row.setup, shlex.split(" ".join(launch.flags))
        read = read_launch(words)
        assert read.num_layers == setup.model.num_layers and read.hidden_size == setup.model.hidden_size
        assert read.tensor_model_parallel_size * read.pipeline_model_parallel_size * setup.data_parallel == launch.gpus
        assert (read.global_batch_size, read.pipeline_schedule) == (setup.global_batch_size, setup.family)
        layout = read.pipeline_model_parallel_layout
        stages = setup.pipeline_parallel * (read.num_virtual_stages_per_pipeline_rank or 1)
        assert (layout.count("|") + 1 if layout else stages) == setup.placement.num_stages
        if table != "terapipe":  # whose programme finds the number of slices
            assert (read.sequence_splits or 1) == len(setup.segments)
        flags = [word for word in words if word.startswith("--")]
        assert len(flags) == len(set(flags))


FIGURES = re.findall(
    r"`bash scripts/paper/(\w+)\.sh --predict` \| ([0-9.]+ ?%?) \| ([0-9.]+ ?%?) \|", (ROOT / "README.md").read_text()
)


@pytest.mark.parametrize("table, mean, worst", FIGURES)
def test_errors_of_the_readme_are_those_that_are_printed(table, mean, worst):
    assert f"figure: {mean} off in the mean, {worst} at worst." in errors_of(table, launches(table))


def test_the_readme_has_the_errors_of_every_launcher():
    assert {table for table, *_ in FIGURES} == set(LAUNCHERS) - {"terapipe"}


@pytest.mark.parametrize("table", FAST)
def test_predictions_fit_a_terminal(table, capsys):
    runs = launches(table)
    print_predictions(table, runs)
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["run", "GPUs", "step", "s"] and len(lines) > len(runs)
    assert max(map(len, lines)) <= 120


def launcher(*arguments, **settings):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"LOGS": "unused", "PYTHON": sys.executable, "REPOSITORY": str(ROOT), **settings}
    command = ["bash", str(ROOT / "scripts" / "paper" / "seq1f1b_7b.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(300), env=environment)


def test_a_prediction_runs_on_a_laptop():
    run = launcher("--predict")
    assert run.returncode == 0, run.stderr
    assert "7B, 131072 tokens, 8 micro-batches, 1F1B" in run.stdout and "out of memory" in run.stdout


@pytest.mark.parametrize(
    "arguments, settings, words",
    [
        ((), {}, "sbatch"),
        (("--dry-run",), {"PYTHON": "false"}, ""),
        (("--dry-run", "7c"), {}, "error: no run of seq1f1b_7b matches 7c; "),
    ],
    ids=["no Slurm", "no list of runs", "no such run"],
)
def test_a_launcher_that_cannot_run_ends(tmp_path, arguments, settings, words):
    run = launcher(*arguments, LOGS=str(tmp_path), **settings)
    assert (run.returncode, run.stdout) == (1, "") and words in run.stderr


def test_the_logs_of_a_job_join_the_table(tmp_path):
    iteration = "iteration {0}/ 4 | elapsed time per iteration (ms): 5000.0 | global batch size: 8 | lm loss: 1.0E+00 |"
    lines = "\n".join(["  seq_length ......... 32768", *(iteration.format(number) for number in range(1, 5))])
    stubs = {"scontrol": "echo node1", "srun": f'echo "$@" >> {tmp_path}/sruns\ncat <<"END"\n{lines}\nEND'}
    bin_folder = write_files(tmp_path / "bin", {name: f"#!/bin/bash\n{text}\n" for name, text in stubs.items()})
    for stub in bin_folder.iterdir():
        stub.chmod(0o755)
    settings = {"LOGS": str(tmp_path / "logs"), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    settings |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-4]"}
    for _ in range(2):  # the second time the log is there
        run = launcher("32768-tokens-8-micro-batches-seq1f1b$", **settings)
        assert run.returncode == 0, run.stderr
    assert (tmp_path / "sruns").read_text().count("--ntasks=32 --ntasks-per-node=8") == 1
    row = next(row for row in throughput() if slug(row.label) == "7b-32768-tokens-8-micro-batches-seq1f1b")
    (found,) = with_logs([row], tmp_path / "logs")
    assert found.measured == pytest.approx(8 * 32768 / 5.0)
    assert as_csv([found]).splitlines()[1].endswith(f",{8 * 32768 / 5.0:.4g}")


def test_slices_that_make_a_step_longer_are_explained():
    runs = launches("terapipe")
    lines = list(slower_with_slices(runs, [step_of(run) for run in runs]))
    assert [line.split(" is slower")[0] for line in lines] == ["setting 2", "setting 3"]
