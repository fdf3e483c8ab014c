"""No script removes or overwrites what it did not make, whatever its variables of paths hold."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.launchers import environment
from support.patience import patient

ROOT = Path(__file__).parents[2]
# Instead of Python, uv, npm and Slurm's commands. They empty and write the folders that the real ones do.
STAND_INS = {
    "python": """
        case "$*" in
            *sysconfig*) echo . ;;
            "- "*) echo torch megatron.core ;;
            *paper_launches.py*) printf 'run\\t8\\t--num-layers 1\\n' ;;
            *mkdocs*) while [ "$1" != --site-dir ]; do shift; done; rm -rf "$2"/*; touch "$2/index.html" ;;
            *torch.distributed.run*) echo 'elapsed time per iteration' ;;
            *sys.executable*) echo "$0" ;;
        esac""",
    "uv": """
        if [ "$1" = venv ]; then
            [ ! -e .venv ] || exit 2
            mkdir -p .venv/bin; for name in python seq1f1b; do cp "$(type -P python3)" .venv/bin/$name; done
        fi""",
    "npm": """
        mkdir package && echo '{"version": "314.0.7"}' > package/package.json
        tar -czf build/pyodide-314.0.7.tgz package && rm -r package && echo pyodide-314.0.7.tgz""",
    "scontrol": "echo node",
    "srun": "echo 'elapsed time per iteration'",
}
SLURM = dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"), "1")
SLURM |= {"SLURM_JOB_NODELIST": "node", "SLURM_CPUS_ON_NODE": "2", "GPUS_PER_NODE": "2"}
NAMES = ("megatron", "seq1f1b", "data", "build", "bin", "quickstart", "logs")  # which a script might take for its own
VALUES = (".", "..", "../home", "../home/megatron", "../home/file", "../link", "-rf", "a b", "*", "megatron", "")
PATHS = {
    "scripts/quickstart.sh": "OUTPUT",
    "scripts/finetune.sh": "OUTPUT",
    "scripts/site.sh": "FOLDER",
    "scripts/setup.sh": "PYTHON PYENV_ROOT",
    "scripts/pretrain_gpt.sh": "DATA_PATH TOKENIZER_MODEL CHECKPOINT_PATH PYTHON",
    "scripts/slurm/pretrain_gpt.sbatch": "LOG_DIR CHECKPOINT_PATH REPOSITORY CONTAINER_MOUNTS",
    "scripts/paper/seq1f1b_7b.sh": "LOGS REPOSITORY",
    "scripts/check_cluster.sh": "FOLDER",
    "scripts/gpu_test.sh": "PYTHON",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of the scripts, set up, beside a home folder, all with files that belong to somebody."""
    repository = tmp_path / "repository"
    shutil.copytree(ROOT / "scripts", repository / "scripts")
    for name in ("pretrain_gpt.py", "pretrain_hybrid.py", "constraints.txt"):
        (repository / name).write_text("kept")
    for folder in (repository, tmp_path / "home", tmp_path):
        for name in NAMES:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "kept").write_text("kept")
        (folder / "file").write_text("kept")
    (tmp_path / "link").symlink_to("home")
    for name in ("python3", *STAND_INS):
        stand_in = tmp_path / "bin" / name
        stand_in.write_text(f"#!/usr/bin/env bash\n{STAND_INS[name.removesuffix('3')]}\n")
        stand_in.chmod(0o755)
    assert run(repository, "scripts/setup.sh").returncode == 0
    return repository


def run(place: Path, script: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    slurm = SLURM if script.startswith(("scripts/slurm", "scripts/paper")) else {}
    path = f"{place.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", script, *words],
        cwd=place,
        env=environment(PATH=path, HOME=str(place.parent / "home"), **slurm, **settings),
        capture_output=True,
        text=True,
        timeout=patient(60),
    )


def kept(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.parent.rglob("*") if path.is_file()}


@pytest.mark.parametrize("script, variable", [(script, each) for script in PATHS for each in PATHS[script].split()])
def test_what_was_there_stays(script, variable, place):
    before = kept(place)
    for value in VALUES:
        if variable == "FOLDER":
            run(place, script, *(["--folder"] if "cluster" in script else []), value)
        else:
            run(place, script, **{variable: value})
        after = kept(place)
        gone = [str(path.relative_to(place.parent)) for path, text in before.items() if after.get(path) != text]
        assert not gone, f"{variable}={value!r} removed or overwrote {gone}"


def test_a_folder_of_an_earlier_start_is_used_again(place):
    for script, words in (("scripts/site.sh", ["../out-site"]), ("scripts/quickstart.sh", [])) * 2:
        ended = run(place, script, *words, OUTPUT="../out")
        assert ended.returncode == 0, ended.stderr
    assert (place.parent / "out" / "seq1f1b" / "log.txt").exists()


@pytest.mark.parametrize(
    "script, folder", [("scripts/quickstart.sh", "."), ("scripts/site.sh", "../home"), ("scripts/setup.sh", ".venv")]
)
def test_the_refusal_names_the_folder(script, folder, place):
    shutil.rmtree(place / ".venv")
    shutil.copytree(place / "data", place / ".venv")
    before = kept(place)
    ended = run(place, script, *[folder] * ("site" in script), OUTPUT=folder)
    assert ended.returncode == 1 and kept(place) == before
    assert ended.stderr == (
        f"error: {folder} exists and was not made by {script}, which would overwrite what is in it: "
        "remove it, or name another.\n"
    )
