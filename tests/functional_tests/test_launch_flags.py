"""The flags that the launchers make, for every preset and every set of installed packages."""

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import batched
from pathlib import Path

import pytest

from support.patience import patient

ROOT = Path(__file__).parents[2]

# Parameters, with 32768 words, of the shapes that the authors trained; the GPUs that they had.
PRESETS = {
    "tiny": (None, 2),
    "2.7b": (2_685_424_640, 8),
    "7b": (6_712_598_528, 32),
    "13b": (12_921_128_960, 32),
    "30b": (29_398_806_528, 64),
}

APEX = ("apex", "fused_layer_norm_cuda", "scaled_upper_triang_masked_softmax_cuda")
FUSION = "fused_weight_gradient_mlp_cuda"
INSTALLED = {
    "nothing": (),
    "te": ("transformer_engine",),
    "te, flash-attn": ("transformer_engine", "flash_attn"),
    "te, apex": ("transformer_engine", *APEX, FUSION, "flash_attn"),
    "te, apex without fusion": ("transformer_engine", *APEX),
    "apex": (*APEX, FUSION),
    "apex without fusion": APEX,
    "apex without softmax": (*APEX[:2], FUSION),
    "flash-attn": ("flash_attn",),
}
SCHEDULES = ({}, {"PIPELINE_SCHEDULE": "megatron"}, {"SEQUENCE_SPLITS": "1"})

# Reads lines of JSON, each with the flags of a launch and its environment, and prints what Megatron and we make of it.
PARSE = """
import argparse, json, os, sys, traceback
import megatron.seq1f1b
sys.argv = ["pretrain_gpt.py", "--device", "cpu"]
megatron.seq1f1b.install()
from megatron.training.arguments import add_megatron_arguments, parse_args, validate_args
from megatron.seq1f1b import add_arguments, validate
from megatron.seq1f1b.cpu.upstream import FLAGS
parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
of_gpus = {name for name, _, _ in FLAGS}  # replaced on a CPU, where this runs
names = "num_layers hidden_size vocab_size bf16 sequence_parallel data_parallel_size global_batch_size lr manual_gc"
names += " transformer_impl gradient_accumulation_fusion masked_softmax_fusion no_persist_layer_norm"
for line in sys.stdin:
    job = json.loads(line)
    os.environ.update(job["environment"])
    sys.argv[1:] = job["flags"]
    seen = {}
    try:
        args = parse_args(add_arguments)
        validate_args(args)
        args.padded_vocab_size = args.vocab_size
        config = validate(args)
        asked = vars(parser.parse_args(job["flags"]))
        seen = {name: asked[name] if name in of_gpus else getattr(args, name) for name in names.split()}
        seen["attention_backend"] = args.attention_backend.name
        seen["cut"] = config.cut(args.seq_length) if config.schedule is not None else None
    except BaseException:
        seen["error"] = traceback.format_exc()
    print("SEEN", json.dumps(seen), flush=True)
"""


def environment(**settings: str) -> dict[str, str]:
    obeyed = r"MODEL_SIZE|GPUS_PER_NODE|DEVICE|DATA_PATH|TP|PP|CUDA_DEVICE_MAX_CONNECTIONS|PYTORCH_.*|SLURM_.*"
    clean = {name: value for name, value in os.environ.items() if not re.fullmatch(obeyed, name)}
    return clean | {"PYTHON": sys.executable} | settings


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder for each set of installed packages, with an empty module for each."""
    folders = {}
    for name, modules in INSTALLED.items():
        folders[name] = tmp_path_factory.mktemp("packages")
        for module in modules:
            (folders[name] / f"{module}.py").write_text("raise ImportError('a launcher must not import this')\n")
    return folders


def launch(folder: Path, *settings: dict[str, str], arguments: str = "") -> subprocess.CompletedProcess:
    """What the launcher makes of each of the settings: a line with its environment, then one with its flags."""
    command = f'set -- {arguments}\nfound=$(source scripts/models.sh; check_python; echo "$installed")\n'
    for each in settings:
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in each.items())
        command += (
            f"(export {exports}; source scripts/models.sh; installed=$found; check_world 1; make_flags; "
            'echo "$CUDA_DEVICE_MAX_CONNECTIONS $PYTORCH_ALLOC_CONF $PYTORCH_CUDA_ALLOC_CONF $GPUS_PER_NODE"; '
            'echo "${flags[*]@Q}")\n'
        )
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT, env=environment(PYTHONPATH=str(folder)), capture_output=True, text=True, timeout=patient(300),
    )  # fmt: skip


def with_gpus(size: str, **settings: str) -> dict[str, str]:
    """The settings of a preset, on the number of GPUs that it needs; the tiny one on GPUs too."""
    on_gpu = {"DEVICE": "cuda"} if size == "tiny" else {}
    return {"MODEL_SIZE": size, "GPUS_PER_NODE": str(PRESETS[size][1])} | on_gpu | settings


@pytest.fixture(scope="module")
def launches(packages) -> dict[tuple[str, str, int], dict]:
    """(size, installed, index of SCHEDULES) -> the launch, for all that are not refused."""
    made = {}
    for installed in INSTALLED:
        keys = [
            (size, installed, index) for size in PRESETS for index in range(len(SCHEDULES)) if fits(size, installed)
        ]
        run = launch(packages[installed], *(with_gpus(size, **SCHEDULES[index]) for size, _, index in keys))
        assert run.returncode == 0, run.stderr
        for key, (variables, flags) in zip(keys, batched(run.stdout.splitlines(), 2), strict=True):
            connections, allocator, old_allocator, gpus = variables.split()
            made[key] = {
                "flags": shlex.split(flags),
                "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "WORLD_SIZE": gpus},
                "allocator": [allocator, old_allocator],
            }
    return made


def fits(size: str, installed: str) -> bool:
    """Tensor parallelism needs layers that mark their parameters."""
    return PRESETS[size][1] < 32 or not {"transformer_engine", "apex"}.isdisjoint(INSTALLED[installed])


@pytest.fixture(scope="module")
def seen(launches) -> dict[tuple[str, str, int], dict]:
    """What Megatron's parser and our validation make of every launch; many differ in what is installed only."""
    jobs = {key: json.dumps({name: job[name] for name in ("flags", "environment")}) for key, job in launches.items()}
    different = list(dict.fromkeys(jobs.values()))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE],
        cwd=ROOT, input="\n".join(different),
        capture_output=True, text=True, timeout=patient(800), env=environment(RANK="0"),
    )  # fmt: skip
    found = [json.loads(line.removeprefix("SEEN ")) for line in run.stdout.splitlines() if line.startswith("SEEN ")]
    assert len(found) == len(different), run.stderr[-2000:]
    seen = dict(zip(different, found, strict=True))
    return {key: seen[job] for key, job in jobs.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("installed", INSTALLED)
@pytest.mark.parametrize("size", PRESETS)
def test_megatron_and_we_accept_the_flags(launches, seen, size, installed):
    for index in range(len(SCHEDULES)):
        if (size, installed, index) not in launches:
            continue
        launch, args = launches[size, installed, index], seen[size, installed, index]
        assert "error" not in args, args["error"]
        has = set(INSTALLED[installed]).__contains__
        assert args["transformer_impl"] == ("transformer_engine" if has("transformer_engine") else "local")
        # Transformer Engine fuses by itself; apex needs its extension.
        assert args["gradient_accumulation_fusion"] == (has("transformer_engine") or has(FUSION))
        assert args["masked_softmax_fusion"] == (has("transformer_engine") or has(APEX[2]))
        assert args["no_persist_layer_norm"] == (not has("transformer_engine") and not has("apex"))
        # Neither the package flash-attn nor cuDNN is asked for, nor taken away.
        assert args["attention_backend"] == "auto" and "--attention-backend" not in launch["flags"]
        assert launch["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == ("32" if size in ("tiny", "2.7b") else "1")
        assert set(launch["allocator"]) == {"expandable_segments:True"} and args["manual_gc"]
        assert (args["cut"] is None) == ("PIPELINE_SCHEDULE" in SCHEDULES[index])


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [size for size in PRESETS if size != "tiny"])
def test_presets_are_the_authors_models(seen, size):
    args, (parameters, _) = seen[size, "te", 0], PRESETS[size]
    layers, hidden, words = args["num_layers"], args["hidden_size"], args["vocab_size"]
    assert layers * (12 * hidden**2 + 13 * hidden) + 2 * words * hidden + 2 * hidden == parameters
    assert args["bf16"] and args["lr"] == 6e-5 and args["data_parallel_size"] == 1
    assert args["sequence_parallel"] == (size != "2.7b")
    assert len(args["cut"]) == 4 and args["cut"][0] > args["cut"][-1]  # of equal time, so shorter and shorter


@pytest.mark.parametrize("installed", ["nothing", "flash-attn"])
def test_tensor_parallelism_without_its_packages_is_refused(packages, installed):
    run = launch(packages[installed], with_gpus("7b"))
    assert run.returncode == 1
    assert run.stderr.startswith("error: TP=8 on GPUs needs Transformer Engine or NVIDIA apex: pip install")


def test_apex_without_extensions_is_refused(tmp_path):
    (tmp_path / "apex.py").touch()
    run = launch(tmp_path, with_gpus("7b"))
    assert run.returncode == 1 and run.stderr.startswith("error: NVIDIA apex is installed without its extensions")


@pytest.mark.parametrize("flag", ["--context-parallel-size 2", "--context-parallel-size=2"])
def test_context_parallel_ranks_count(packages, flag):
    """Megatron requires one hardware queue for them, too, and they take no part of the batch."""
    size = with_gpus("2.7b", GPUS_PER_NODE="16")
    run = launch(packages["te"], size, arguments=flag)
    variables, flags = run.stdout.splitlines()
    assert variables.split()[0] == "1", run.stderr
    assert shlex.split(flags)[shlex.split(flags).index("--global-batch-size") + 1] == "16"
    assert "--context-parallel-size 3: change" in launch(packages["te"], size, arguments=flag.replace("2", "3")).stderr


def test_what_the_user_set_stays(packages):
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    run = launch(packages["te"], with_gpus("7b", **own))
    assert run.stdout.split("\n")[0] == "8 max_split_size_mb:512 max_split_size_mb:512 32"
