"""The flags that the launchers make, for every preset and every set of installed packages, and those that the planner
prints go through Megatron's parser and its checks, and through ours."""

import argparse
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterable
from itertools import batched, product
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments, parse_args, validate_args

import megatron.seq1f1b
from megatron.seq1f1b import add_arguments, validate
from megatron.seq1f1b.commands.launch_flags import decided_flags
from megatron.seq1f1b.commands.model_flags import model_of, read_model, training_flags
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.planner.space import Candidate, Question
from megatron.seq1f1b.platform.stand_ins import FLAGS
from support.launch import python_path
from support.launchers import run
from unit_tests.planner.question import candidates

NAMES = [
    *("num_layers", "hidden_size", "vocab_size", "bf16", "sequence_parallel", "data_parallel_size", "manual_gc", "lr"),
    *("global_batch_size", "transformer_impl", "gradient_accumulation_fusion", "masked_softmax_fusion"),
    "no_persist_layer_norm",
]

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


def folder_with(modules: Iterable[str], folder: Path) -> Path:
    for module in modules:
        (folder / f"{module}.py").write_text("raise ImportError('a launcher must not import this')\n")
    return folder


def launched(folder: Path, *settings: dict[str, str], arguments: str = "") -> subprocess.CompletedProcess:
    """What the launcher makes of each of the settings: a line with its environment, then one with its flags."""
    command = f'set -- {arguments}\nfound=$(source scripts/models.sh; check_python; echo "$installed")\n'
    for each in settings:
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in each.items())
        command += (
            f"(export {exports}; source scripts/models.sh; installed=$found; check_world 1; make_flags; "
            'echo "$CUDA_DEVICE_MAX_CONNECTIONS $PYTORCH_ALLOC_CONF $PYTORCH_CUDA_ALLOC_CONF $GPUS_PER_NODE"; '
            'echo "${flags[*]@Q}")\n'
        )
    return run(["bash", "-euo", "pipefail", "-c", command], timeout=300, PYTHONPATH=python_path(folder))


def with_gpus(size: str, **settings: str) -> dict[str, str]:
    """The settings of a preset, on the number of GPUs that it needs; the tiny one on GPUs too."""
    on_gpu = {"DEVICE": "cuda"} if size == "tiny" else {}
    return {"MODEL_SIZE": size, "GPUS_PER_NODE": str(PRESETS[size][1])} | on_gpu | settings


def accepted(jobs: list[dict]) -> list[dict]:
    """What Megatron's parser and our validation make of launches, each with `flags` and its `environment`."""
    sys.argv[1:] = ["--device", "cpu"]
    megatron.seq1f1b.install()
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    of_gpus = {name for name, _, _ in FLAGS}  # replaced on a CPU, where this runs
    found = []
    for job in jobs:
        os.environ.update(job["environment"])
        sys.argv[1:] = job["flags"]
        try:
            args = parse_args(add_arguments)
            validate_args(args)
            args.padded_vocab_size = args.vocab_size
            config = validate(args)
        except BaseException:
            found.append({"error": traceback.format_exc()})
            continue
        cut = [*config.cut(args.seq_length)] if config.schedule is not None else None
        asked = vars(parser.parse_args(job["flags"]))
        found.append({name: asked[name] if name in of_gpus else getattr(args, name) for name in NAMES})
        found[-1] |= {"attention_backend": args.attention_backend.name, "cut": cut}
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("installed", INSTALLED)
def test_megatron_and_we_accept_the_flags(launch, installed, tmp_path):
    has = set(INSTALLED[installed]).__contains__
    is_complete = has("transformer_engine") or has("apex")  # tensor parallelism needs layers that mark their parameters
    cases = [case for case in product(PRESETS, SCHEDULES) if is_complete or PRESETS[case[0]][1] < 32]
    folder = folder_with(INSTALLED[installed], tmp_path)
    run = launched(folder, *(with_gpus(size, **schedule) for size, schedule in cases))
    assert run.returncode == 0, run.stderr
    jobs, allocators = [], set()
    for variables, flags in batched(run.stdout.splitlines(), 2):
        connections, *allocator, gpus = variables.split()
        allocators |= set(allocator)
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "WORLD_SIZE": gpus}
        jobs.append({"flags": shlex.split(flags), "environment": environment})
    assert allocators == {"expandable_segments:True"}
    (found,) = launch.call(1, accepted, timeout=800, jobs=jobs)
    for (size, schedule), job, args in zip(cases, jobs, found, strict=True):
        assert "error" not in args, args["error"]
        assert args["transformer_impl"] == ("transformer_engine" if has("transformer_engine") else "local")
        # Transformer Engine fuses by itself; apex needs its extension.
        assert args["gradient_accumulation_fusion"] == (has("transformer_engine") or has(FUSION))
        assert args["masked_softmax_fusion"] == (has("transformer_engine") or has(APEX[2]))
        assert args["no_persist_layer_norm"] == (not is_complete)
        # Neither the package flash-attn nor cuDNN is asked for, nor taken away.
        assert args["attention_backend"] == "auto" and "--attention-backend" not in job["flags"]
        assert job["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == ("32" if size in ("tiny", "2.7b") else "1")
        assert args["manual_gc"] and (args["cut"] is None) == ("PIPELINE_SCHEDULE" in schedule)
        if size == "tiny":
            continue
        layers, hidden, words = args["num_layers"], args["hidden_size"], args["vocab_size"]
        assert layers * (12 * hidden**2 + 13 * hidden) + 2 * words * hidden + 2 * hidden == PRESETS[size][0]
        assert args["bf16"] and args["lr"] == 6e-5 and args["data_parallel_size"] == 1
        assert args["sequence_parallel"] == (size != "2.7b")
        if not schedule:
            assert len(args["cut"]) == 4 and args["cut"][0] > args["cut"][-1]  # of equal time, so shorter and shorter


def test_packages_that_tensor_parallelism_lacks_are_named(tmp_path):
    for module, sentence in (
        ("flash_attn", "TP=8 on GPUs needs Transformer Engine or NVIDIA apex: pip install"),
        ("apex", "NVIDIA apex is installed without its extensions"),
    ):
        run = launched(folder_with([module], tmp_path), with_gpus("7b"))
        assert run.returncode == 1 and run.stderr.startswith(f"error: {sentence}")


@pytest.mark.parametrize("flag", ["--context-parallel-size 2", "--context-parallel-size=2"])
def test_context_parallel_ranks_count(flag, tmp_path):
    """Megatron requires one hardware queue for them, too, and they take no part of the batch."""
    size, folder = with_gpus("2.7b", GPUS_PER_NODE="16"), folder_with(INSTALLED["te"], tmp_path)
    run = launched(folder, size, arguments=flag)
    variables, flags = run.stdout.splitlines()
    assert variables.split()[0] == "1", run.stderr
    assert shlex.split(flags)[shlex.split(flags).index("--global-batch-size") + 1] == "16"
    refused = launched(folder, size, arguments=flag.replace("2", "3"))
    assert "--context-parallel-size 3: change" in refused.stderr


def test_what_the_user_set_stays(tmp_path):
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    run = launched(folder_with(INSTALLED["te"], tmp_path), with_gpus("7b", **own))
    assert run.stdout.split("\n")[0] == "8 max_split_size_mb:512 max_split_size_mb:512 32"


DENSE = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 8 --vocab-size 32768 --swiglu "
    "--disable-bias-linear --group-query-attention --num-query-groups 4"
)
MIXTURE = (
    f"{DENSE} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 256 "
    "--moe-layer-freq [0]*2+[1]*6"
)
# What a user adds to the flags of a preset, and what a CPU without Transformer Engine needs.
REST = (
    "--mock-data --tokenizer-type NullTokenizer --train-iters 2 --lr 1e-4 --eval-iters 0 "
    "--transformer-impl local --no-masked-softmax-fusion --no-gradient-accumulation-fusion --device cpu"
)
# Sizes of tensor, context, pipeline, data and expert parallelism, model chunks, segments, schedule.
PLANS = {
    "dense": (DENSE, 2, 1, 4, 2, 1, 1, 4, "zb-h1"),
    "chunks": (DENSE, 1, 2, 2, 4, 1, 2, 4, "1f1b"),
    "layout": (DENSE, 2, 1, 2, 4, 1, 3, 4, "1f1b"),
    "experts": (MIXTURE, 2, 1, 2, 4, 4, 2, 1, "breadth-first"),
}


def planned(words: str, *wanted: int | str) -> Candidate:
    def choices(setup) -> tuple[int | str, ...]:
        sizes = setup.tensor_parallel, setup.context_parallel, setup.pipeline_parallel, setup.data_parallel
        return *sizes, setup.expert_parallel, setup.placement.num_chunks, len(setup.segments), setup.family

    question = Question(model_of(read_model(words.split())), read_machine("a100-80gb"), 16, 8192, 16)
    found = (each for each in candidates(question) if choices(each.setup) == wanted)
    return next(each for each in found if each.setup.recompute == "none")


def test_megatron_and_our_validation_take_plans(launch):
    plans, jobs = [planned(*plan) for plan in PLANS.values()], []
    for candidate, plan in zip(plans, PLANS.values(), strict=True):
        flags = [plan[0], *training_flags(8192), *decided_flags(candidate), REST]
        jobs.append({"flags": shlex.split(" ".join(flags)), "environment": {"WORLD_SIZE": "16"}})
    (found,) = launch.call(1, accepted, timeout=800, jobs=jobs)
    for name, candidate, args in zip(PLANS, plans, found, strict=True):
        assert "error" not in args, f"{name}: {args['error']}"
        setup = candidate.setup
        sizes = {"data_parallel_size": setup.data_parallel, "global_batch_size": setup.global_batch_size}
        assert args.items() >= (sizes | {"num_layers": 8, "cut": [*setup.segments]}).items(), name
