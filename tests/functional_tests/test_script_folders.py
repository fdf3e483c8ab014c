"""No script removes or overwrites what it did not make, whatever its variables of paths hold."""

import shutil
from pathlib import Path

import pytest

from support.script_place import kept, make_place, run

VALUES = (".", "..", "../home", "../home/megatron", "../home/file", "../link", "-rf", "a b", "*", "megatron", "")
PATHS = {
    "scripts/quickstart.sh": "OUTPUT",
    "scripts/finetune.sh": "OUTPUT",
    "scripts/site.sh": "FOLDER",
    "scripts/setup.sh": "PYTHON PYENV_ROOT",
    "scripts/pretrain.sh": "DATA_PATH TOKENIZER_MODEL CHECKPOINT_PATH PYTHON",
    "scripts/slurm/pretrain.sbatch": "LOG_DIR CHECKPOINT_PATH REPOSITORY CONTAINER_MOUNTS",
    "scripts/paper/seq1f1b_7b.sh": "LOGS REPOSITORY",
    "scripts/check_cluster.sh": "FOLDER",
    "scripts/gpu_test.sh": "PYTHON PACKED",
    "scripts/pack_gpu_test.sh": "FOLDER",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


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
