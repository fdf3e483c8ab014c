"""The scripts run the same wherever they are started, and say in one sentence what is in their way."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from support.script_place import make_place, run

AT_HOME = ("setup.sh", "quickstart.sh", "finetune.sh", "pretrain.sh", "check_cluster.sh", "gpu_test.sh", "site.sh")
LAUNCHERS = ("scripts/pretrain.sh", "scripts/slurm/pretrain.sbatch")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


def all_scripts(place: Path) -> list[str]:
    paths = [*place.glob("scripts/*.sh"), *place.glob("scripts/paper/*.sh"), *place.glob("scripts/slurm/*.sbatch")]
    sourced = ("checks.sh", "models.sh", "python.sh", "run.sh", "test.sh")  # test.sh needs the whole repository
    return sorted(str(path.relative_to(place)) for path in paths if path.name not in sourced)


def files(place: Path) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in place.parent.rglob("*")}


def test_every_script_answers_help_before_any_work(place):
    """By the comment at its head, which shows how it is started. test.sh, too, and where there is no Slurm."""
    before = files(place)
    scripts = [*all_scripts(place), "scripts/test.sh"]
    scripts.remove("scripts/other_versions.sh")  # which others source
    assert len(scripts) > 15
    for script in scripts:
        for word in ("--help", "-h"):
            answer = run(place, script, word, SLURM_JOB_ID="", SLURM_JOB_NODELIST="")
            assert (answer.returncode, answer.stderr) == (0, ""), script
            assert Path(script).name in answer.stdout and "SBATCH" not in answer.stdout, answer.stdout
            assert (place / script).read_text().count("# " + answer.stdout.splitlines()[0]) == 1
    assert files(place) == before


@pytest.mark.parametrize(
    "command, sentence",
    [
        ("setup.sh banana", "banana is no version of PyTorch, such as 2.11.0."),
        ("setup.sh 2.11.0/..", "2.11.0/.. is no version of PyTorch, such as 2.11.0."),
        ("test_torch.sh 2", "2 is no version of PyTorch, such as 2.11.0."),
        ("setup.sh --fast", "--fast is no argument of scripts/setup.sh: bash scripts/setup.sh --help lists them."),
        ("setup.sh 2.11.0 3", "3 is one word too many: bash scripts/setup.sh --help lists the arguments."),
        ("quickstart.sh 80", "80 is one word too many: bash scripts/quickstart.sh --help lists the arguments."),
        ("finetune.sh --fast", "--fast is no argument of scripts/finetune.sh: "),
        ("site.sh one two", "two is one word too many: "),
        ("pack_gpu_test.sh --fast", "--fast is no argument of scripts/pack_gpu_test.sh: "),
        ("test_megatron.sh --fast", "--fast is no argument of scripts/test_megatron.sh: "),
        ("test_torch.sh --fast", "--fast is no argument of scripts/test_torch.sh: "),
        ("paper/terapipe.sh --predct", "--predct is no argument of scripts/paper/terapipe.sh: "),
        ("paper/terapipe.sh --dry-run a b", "b is one word too many: "),
    ],
)
def test_words_that_a_script_does_not_know_are_refused(command, sentence, place):
    before = files(place)
    script, *words = command.split()
    answer = run(place, f"scripts/{script}", *words)
    assert answer.returncode == 1 and answer.stderr.startswith(f"error: {sentence}"), answer.stderr
    assert answer.stdout == "" and answer.stderr.count("\n") == 1 and files(place) == before


def test_versions_of_pytorch_are_taken_as_they_are_written(place):
    for version in ("2.11", "2.13.0", "2.14.0.dev20260101", "2.13.0+cpu", "2.12.0rc3"):
        assert "is no version" not in run(place, "scripts/setup.sh", version).stderr


def test_cdpath_leads_no_script_elsewhere(place):
    """To another copy, whose scripts would leave a file."""
    other = place.parent / "elsewhere" / "repository"
    shutil.copytree(place / "scripts", other / "scripts")
    for path in (other / "scripts").rglob("*.*"):
        path.write_text(f"touch {other}/was-run\n")
    scripts = all_scripts(place)
    assert len(scripts) > 10 and {f"scripts/{name}" for name in AT_HOME} < {*scripts}
    for script in scripts:
        run(place, script, CDPATH=str(other))
        run(place, script, cwd=place.parent, REPOSITORY="repository", CDPATH=str(other.parent))
    assert [path for path in other.iterdir()] == [other / "scripts"]


def test_a_script_is_started_by_a_link(place):
    for name in AT_HOME:
        usual = run(place, f"scripts/{name}")
        link = place.parent / "home" / "bin" / name
        link.symlink_to(f"../../repository/scripts/{name}")
        linked = run(place, link, cwd=place.parent / "home")
        assert (linked.returncode, linked.stdout) == (usual.returncode, usual.stdout), linked.stderr


def test_a_complete_set_up_needs_neither_a_network_nor_to_write(place):
    (place.parent / "NO_NETWORK").touch()
    again = run(place, "scripts/setup.sh", within=obeying_permissions(place))
    assert again.returncode == 0 and again.stdout.startswith("Set up already: "), again.stderr
    assert run(place, "scripts/pretrain.sh", within=obeying_permissions(place)).returncode == 0
    output = str(place.parent / "home" / "out")
    assert run(place, "scripts/quickstart.sh", within=obeying_permissions(place), OUTPUT=output).returncode == 0


@pytest.mark.parametrize("change", ["constraints.txt", "pyproject.toml", "scripts/setup.sh", "a move"])
def test_what_has_changed_is_set_up_anew(change, place):
    if change == "a move":
        place = place.rename(place.with_name("moved"))
    else:
        with (place / change).open("a") as file:
            file.write("# more")
    assert "Installing" in run(place, "scripts/setup.sh").stdout
    assert "Set up already" in run(place, "scripts/setup.sh").stdout


def test_without_a_network_the_set_up_says_so_and_goes_on_later(place):
    with (place / "constraints.txt").open("a") as file:
        file.write("new==1")
    (place.parent / "NO_NETWORK").touch()
    for _ in range(2):
        done = run(place, "scripts/setup.sh")
        assert (
            done.returncode == 1
            and "error: no route to host\nerror: the packages could not be brought in" in done.stderr
        )
        assert "Is there a network?" in done.stderr and (place / ".venv" / "bin" / "python").exists()
    (place.parent / "NO_NETWORK").unlink()
    assert run(place, "scripts/setup.sh").returncode == 0
    assert "Set up already" in run(place, "scripts/setup.sh").stdout
    (place.parent / "NO_NETWORK").touch()
    done = run(place, "scripts/site.sh")
    assert done.returncode == 1 and done.stderr.startswith("error: npm could not bring in pyodide")


def test_a_set_up_that_was_cut_short_is_made_anew(place):
    installed = place / ".venv" / "installed"
    # While packages were installed: what is half written is replaced.
    (place / ".venv" / ".made-of").unlink()
    installed.unlink()
    assert run(place, "scripts/setup.sh").returncode == 0
    assert [line.split()[3] for line in installed.read_text().splitlines()] == ["--reinstall"] * 2
    # While the environment was made: it has the mark of its script, and no Python that runs.
    shutil.rmtree(place / ".venv" / "bin")
    (place / ".venv" / ".made-of").unlink()
    (place / ".venv" / "half").touch()
    assert run(place, "scripts/setup.sh").returncode == 0
    assert not (place / ".venv" / "half").exists() and (place / ".venv" / "bin" / "python").exists()
    # While it was emptied.
    for path in (place / ".venv").iterdir():
        if path.name != ".made-by-seq1f1b":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run(place, "scripts/setup.sh").returncode == 0


@pytest.mark.parametrize(
    "script, sentence",
    [
        ("scripts/setup.sh", "error: {place} cannot be written, so .venv cannot be made there: "),
        ("scripts/quickstart.sh", "error: out cannot be made or written: name another folder.\n"),
        ("scripts/finetune.sh", "error: out cannot be made or written: name another folder.\n"),
        ("scripts/site.sh", "error: build/site cannot be made or written: name another folder.\n"),
        ("scripts/slurm/pretrain.sbatch", "error: LOG_DIR=out cannot be made or written: name another folder.\n"),
        ("scripts/paper/terapipe.sh", "error: LOGS=out cannot be made or written: name another folder.\n"),
    ],
)
def test_a_checkout_that_cannot_be_written_is_one_sentence(script, sentence, place):
    if "setup" in script:
        (place / ".venv" / ".made-of").unlink()
    out = dict.fromkeys(("OUTPUT", "LOG_DIR", "LOGS"), "out")
    done = run(place, script, within=obeying_permissions(place), **out)
    assert (
        done.returncode == 1 and done.stderr.startswith(sentence.format(place=place)) and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    "script, missing",
    [
        ("scripts/paper/terapipe.sh", "megatron-seq1f1b"),
        ("scripts/check_cluster.sh", "torch"),
        ("scripts/gpu_test.sh", "torch"),
        ("scripts/pretrain.sh", "torch or no megatron-core"),
        ("scripts/site.sh", "mkdocs"),
    ],
)
def test_a_python_without_what_a_script_needs_is_one_sentence(script, missing, place):
    """As after a clone, before anything is set up; the folder `megatron` of the clone is no installed package."""
    bare = place.parent / "bare"
    bare.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    (place / "megatron" / "seq1f1b").mkdir()
    words = ("--predict",) if script.startswith("scripts/paper") else ()
    done = run(place, script, *words, PYTHON=str(bare))
    sentence = f"error: {bare} has no {missing}: run bash scripts/setup.sh, or set PYTHON.\n"
    assert (done.returncode, done.stderr) == (1, sentence)
    bare.write_text("#!/usr/bin/env bash\nexit 1\n")  # as one that is too old answers
    done = run(place, script, *words, PYTHON=str(bare))
    assert done.returncode == 1 and done.stderr.startswith(f"error: PYTHON={bare} does not run, or is older than 3.12")


def obeying_permissions(place: Path) -> list[str]:
    """A command that takes from root what lets it write everywhere; the place is made read-only."""
    for folder in (place, *filter(Path.is_dir, place.rglob("*"))):
        folder.chmod(0o555)
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may write everywhere, and setpriv (util-linux) is not installed")
    return ["setpriv", "--bounding-set", "-dac_override"]


NUMBERS = {
    "scripts/pretrain.sh": "TP PP CHUNKS NUM_LAYERS HIDDEN_SIZE NUM_HEADS SEQ_LENGTH VOCAB_SIZE MICRO_BATCH_SIZE "
    "NUM_MICRO_BATCHES TRAIN_ITERS SAVE_INTERVAL SEQUENCE_SPLITS UNIT_TOKENS EVAL_ITERS GPUS_PER_NODE",
    "scripts/quickstart.sh": "TRAIN_ITERS SEQ_LENGTH NUM_MICRO_BATCHES SEQUENCE_SPLITS VOCAB_SIZE",
    "scripts/finetune.sh": "TRAIN_ITERS SEQ_LENGTH UNIT_TOKENS",
    "scripts/check_cluster.sh": "GPUS_PER_NODE",
    "scripts/paper/terapipe.sh": "GPUS_PER_NODE",
}


@pytest.mark.parametrize("script", NUMBERS)
def test_numbers_that_would_wrap_are_refused(script, place):
    for name in NUMBERS[script].split():
        for number in ("10000000000", "18446744073709551618", f"1{'0' * 40}"):  # the second is 2 in 64 bits
            done = run(place, script, **{name: number})
            assert done.returncode == 1 and done.stderr.startswith(f"error: {name}={number} is too large: at most ")
            assert done.stderr.count("\n") == 1
    if "pretrain" in script:
        done = run(place, script, DRY_RUN="1", WORLD_SIZE="18446744073709551618")
        assert "error: WORLD_SIZE=18446744073709551618 is too large" in done.stderr
        done = run(place, script, "--context-parallel-size", "18446744073709551618")
        assert "error: CP=18446744073709551618 is too large" in done.stderr


@pytest.mark.parametrize("script", LAUNCHERS)
def test_words_of_data_path_are_names_and_no_patterns(script, place):
    (place / "only.idx").touch()
    for value in ("*", "onl?", "[o]nly", "only *", "only\n*"):
        done = run(place, script, DATA_PATH=value, TOKENIZER_MODEL="x")
        assert done.returncode == 1, value
        assert done.stderr == f"error: DATA_PATH: there is no {value.split()[-1]}.idx; seq1f1b preprocess makes it.\n"
