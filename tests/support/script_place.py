"""A copy of the scripts among files that belong to somebody, with stand-ins for the programs that they start."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from support.launchers import environment
from support.patience import patient

ROOT = Path(__file__).parents[2]
# Instead of Python, uv, npm and Slurm's commands. They empty and write the folders that the real ones do.
STAND_INS = {
    "python": """
        case "$*" in
            *sysconfig*) echo . ;;
            "-P - "*) printf '%s ' torch megatron.core megatron.seq1f1b mkdocs material mkdocs_glightbox mkdocstrings ;;
            *paper_launches.py*) printf 'run\\t8\\t--num-layers 1\\n' ;;
            *mkdocs*) while [ "$1" != --site-dir ]; do shift; done; rm -rf "$2"/*; touch "$2/index.html" ;;
            *torch.distributed.run*) echo 'elapsed time per iteration' ;;
            *sys.executable*) echo "$0" ;;
        esac""",
    # With a file NO_NETWORK beside the repository it brings in nothing.
    "uv": """
        if [ "$1" = venv ]; then
            mkdir -p .venv/bin; for name in python seq1f1b; do cp "$(type -P python3)" .venv/bin/$name; done
        elif [ "$1 $2" = "pip install" ]; then
            [ ! -e ../NO_NETWORK ] || { echo "error: no route to host" >&2; exit 2; }
            echo "$*" >>.venv/installed
        fi""",
    "npm": """
        [ ! -e ../NO_NETWORK ] || exit 1
        mkdir package && echo '{"version": "314.0.7"}' > package/package.json
        tar -czf build/pyodide-314.0.7.tgz package && rm -r package && echo pyodide-314.0.7.tgz""",
    "scontrol": "echo node",
    "srun": "echo 'elapsed time per iteration'",
}
SLURM = dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"), "1")
SLURM |= {"SLURM_JOB_NODELIST": "node", "SLURM_CPUS_ON_NODE": "2", "GPUS_PER_NODE": "2"}
NAMES = ("megatron", "seq1f1b", "data", "build", "bin", "quickstart", "logs")  # which a script might take for its own


def make_place(folder: Path) -> Path:
    """The copy of the repository, set up, beside a home folder, all with files that belong to somebody."""
    repository = folder / "repository"
    shutil.copytree(ROOT / "scripts", repository / "scripts")
    for name in ("pretrain_gpt.py", "pretrain_hybrid.py", "constraints.txt", "pyproject.toml"):
        (repository / name).write_text("kept")
    for owned in (repository, folder / "home", folder):
        for name in NAMES:
            (owned / name).mkdir(parents=True, exist_ok=True)
            (owned / name / "kept").write_text("kept")
        (owned / "file").write_text("kept")
    (folder / "link").symlink_to("home")
    for name in ("python3", *STAND_INS):
        stand_in = folder / "bin" / name
        stand_in.write_text(f"#!/usr/bin/env bash\n{STAND_INS[name.removesuffix('3')]}\n")
        stand_in.chmod(0o755)
    assert run(repository, "scripts/setup.sh").returncode == 0
    return repository


def run(
    place: Path,
    script: str | Path,
    *words: str,
    cwd: Path | None = None,
    within: Iterable[str] = (),
    **settings: str,
) -> subprocess.CompletedProcess[str]:
    """A script of the place, started in `cwd` or at its root, by the command `within`."""
    slurm = SLURM if str(script).startswith(("scripts/slurm", "scripts/paper")) else {}
    path = f"{place.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [*within, "bash", script if cwd is None else place / script, *words],
        cwd=cwd or place,
        env=environment(**{"PATH": path, "HOME": str(place.parent / "home")} | slurm | settings),
        capture_output=True,
        text=True,
        timeout=patient(60),
    )


def kept(place: Path) -> dict[Path, bytes]:
    """All files of the place by their paths."""
    return {path: path.read_bytes() for path in place.parent.rglob("*") if path.is_file()}
