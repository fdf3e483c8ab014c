"""`--dry-run` from end to end: it starts, counts what a real step takes, and fails as a real launch does."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.seq1f1b import commands
from megatron.seq1f1b.commands import plan
from megatron.seq1f1b.commands.launch_flags import read_launch
from megatron.seq1f1b.commands.model_flags import model_of
from megatron.seq1f1b.costs.machine import GIB, read_machine
from megatron.seq1f1b.costs.step_memory import host_bytes, rank_memory
from megatron.seq1f1b.planner.launch_candidate import candidate_of_launch
from megatron.seq1f1b.planner.space import Question
from megatron.seq1f1b.schedule import build, units_to_move, with_moves
from support.launch import PRETRAIN, ROOT
from support.launchers import started
from support.on_ranks import few_of

# Long enough for activations to outweigh what is the same for any length.
MODEL = (
    *("--num-layers", 4, "--hidden-size", 64, "--num-attention-heads", 4),
    *("--seq-length", 512, "--max-position-embeddings", 512, "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--attention-dropout", 0, "--hidden-dropout", 0),
    *("--micro-batch-size", 1, "--global-batch-size", 4, "--train-iters", 5, "--lr", 1e-3, "--eval-iters", 0),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", 255, "--num-workers", 0),
)
TWO_STAGES = ("--pipeline-model-parallel-size", 2)
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
HALF = "--offload-activations 0.5"
# By name, the number of ranks and the flags.
LAYOUTS = {
    "seq1f1b": (2, "--sequence-splits 4 --use-distributed-optimizer --bf16"),
    "zb-h1": (2, "--sequence-splits 4 --pipeline-schedule zb-h1"),
    "full recomputation": (2, f"--sequence-splits 4 {RECOMPUTED}"),
    "all but attention": (2, f"--sequence-splits 4 {RECOMPUTED} --recompute-keeps-attention"),
    "offload": (2, "--sequence-splits 4 --offload-activations 1 --bf16"),
    "offload all but attention": (2, f"--sequence-splits 4 {RECOMPUTED} --recompute-keeps-attention {HALF}"),
    "selective recomputation": (2, "--sequence-splits 4 --recompute-granularity selective"),
    "distributed optimizer": (4, "--sequence-splits 2 --use-distributed-optimizer --bf16"),
    "partitioned state": (
        4,
        f"{CHUNKS} --pipeline-schedule breadth-first --use-distributed-optimizer --bf16 --partition-state",
    ),
    "megatron-interleaved": (2, CHUNKS),
}
FEW = ("seq1f1b", "zb-h1", "offload", "partitioned state")
TOLERANCE = 0.01
FUNCTIONAL_TESTS = ROOT / "tests" / "functional_tests"


def stages_of(launch, world_size, *flags, output):
    """What is written of each pipeline rank in a rehearsal that succeeds."""
    flags = [*MODEL, *flags, "--dry-run", "--dry-run-output", output]
    launch(1, flags, env={"WORLD_SIZE": str(world_size)}, timeout=400).check()
    return json.loads((output / "rehearsal.json").read_text())["pipeline_ranks"]


def test_a_launch_on_eight_gpus(launch, tmp_path):
    """With the tokenizer of the authors' scripts, which Megatron would look up at a hub. In fp32, with dropout."""
    (tmp_path / "vocab.json").write_text(json.dumps({f"word{i}": i for i in range(1000)}))
    at = MODEL.index("--tokenizer-type")
    gpt2 = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", tmp_path / "vocab.json", "--merge-file", "merges")
    parallel = ("--device", "cuda", "--tensor-model-parallel-size", 2, "--sequence-parallel", *TWO_STAGES)
    segments = ("--pipe-sp-splits", 4, "--pipe-sp-strategy", "average", "--use-distributed-optimizer")
    # What another package does, and what reads values.
    of_cluster = f"""--save {tmp_path} --save-interval 1 --async-save --use-persistent-ckpt-worker --log-params-norm
        --log-num-zeros-in-grad --check-weight-hash-across-dp-replicas-interval 1 --attention-dropout 0.1"""
    flags = [*MODEL[:at], *gpt2, *parallel, *segments, *of_cluster.split(), "--dry-run", "--dry-run-output", tmp_path]
    job = launch(1, flags, env={"WORLD_SIZE": "8", "HF_HUB_OFFLINE": "1"}, timeout=400).check()
    assert "on 8 GPUs (TP 2 × PP 2 × DP 2)" in job.log
    assert "Memory: fits. " in job.log and "both ends of each agree on their number, order" in job.log
    assert "Not proved by a rehearsal:" in job.log and "Transformer Engine's layers by Megatron's local" in job.log
    report = json.loads((tmp_path / "rehearsal.json").read_text())
    assert report["fits"] and not report["problems"]
    assert [stage["rank"] for stage in report["pipeline_ranks"]] == [0, 4]
    assert (tmp_path / "memory.png").exists()


@pytest.mark.parametrize("layout", few_of(LAYOUTS, FEW))
def test_counted_bytes_are_those_of_the_real_step(launch, layout, tmp_path):
    ranks, words = LAYOUTS[layout]
    flags = ("--device", "cpu", *TWO_STAGES, *words.split())
    stages = stages_of(launch, ranks, *flags, output=tmp_path)
    script = FUNCTIONAL_TESTS / "workers" / "rehearsal_worker.py"
    launch(ranks, [*MODEL, *flags], script=script, env={"COUNTS": str(tmp_path)}, timeout=400).check()
    for rehearsed in stages:
        moments = json.loads((tmp_path / f"{rehearsed['rank']}.json").read_text())
        assert [moment["name"] for moment in moments] == [moment["name"] for moment in rehearsed["moments"]]
        real, counted = fullest(moments), fullest(rehearsed["moments"])
        assert (rehearsed["host_bytes"] > 0) == ("--offload-activations" in words)
        assert counted == pytest.approx(real, rel=TOLERANCE), rehearsed["rank"]
        assert real.keys() >= {"weights", "gradients", "optimizer state", "activations", "messages"}


def fullest(moments):
    """Bytes of each category, and of all together, at the fullest moment of a step."""
    peak = max((moment["peak"] for moment in moments), key=lambda peak: sum(peak.values()))
    return peak | {"in all": sum(peak.values())}


# Four layers of llama3-70b, at a length at which activations outweigh weights: the loss in pieces, grouped keys and
# values. The sizes of tensor and context parallelism, and the share on the host, are those of a case.
LLAMA = f"""--num-layers 4 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --swiglu
    --group-query-attention --num-query-groups 8 --normalization RMSNorm --disable-bias-linear --vocab-size 128256
    --seq-length {2**18} --max-position-embeddings {2**18} --global-batch-size 1 --sequence-parallel {CHUNKS}
    --sequence-splits 16 --sequence-split-strategy even --use-distributed-optimizer --bf16 --device cuda
    --no-create-attention-mask-in-dataloader --cp-comm-type a2a"""
BY_HEADS = "--tensor-model-parallel-size 4 --context-parallel-size 2"
# Four layers a rank in one chunk.
OF_DEEP = (
    LLAMA.replace(CHUNKS, "--tensor-model-parallel-size 8")
    .replace("--num-layers 4", "--num-layers 8")
    .replace("--sequence-splits 16", "--sequence-splits 8")
    .replace("--global-batch-size 1", "--global-batch-size 2")
)
AGAIN = f"{RECOMPUTED} --recompute-keeps-attention"
MODULES = "--recompute-granularity selective --recompute-modules layernorm mlp"
# Of Qwen3-30B-A3B; what sorts tokens, and the router, are not in the planner's count.
EXPERTS = """--num-layers 4 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm --swiglu --normalization RMSNorm
    --disable-bias-linear --vocab-size 32768 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 --seq-length 32768
    --max-position-embeddings 32768 --global-batch-size 32 --bf16
    --use-distributed-optimizer --no-create-attention-mask-in-dataloader --device cuda"""
IN_PAIRS = "--overlap-moe-expert-parallel-comm"
REPEATED = "--recompute-granularity selective --recompute-modules moe"
PLANNED = {
    "here": f"{LLAMA} --tensor-model-parallel-size 8 {AGAIN}",
    "there": f"{LLAMA} --tensor-model-parallel-size 8 {AGAIN} --offload-activations 1",
    "modules there": f"{LLAMA} --tensor-model-parallel-size 8 {MODULES} --offload-activations 1",
    "layers there": f"{OF_DEEP} {MODULES} --offload-activations 1 --offload-layers-leaving 2",
    "all of layers there": f"{OF_DEEP} --offload-activations 1 --offload-layers-leaving 3",
    "by heads there": f"{LLAMA} {BY_HEADS} {MODULES} --offload-activations 1",
    "by heads": f"{LLAMA} {BY_HEADS}",
    "experts and norms of heads": f"{EXPERTS} --sequence-splits 4 --sequence-split-strategy even",
    "experts in pairs": f"{EXPERTS} {IN_PAIRS} --sequence-splits 4 --sequence-split-strategy even",
    "whole sequences in pairs": f"{EXPERTS} {IN_PAIRS} --pipeline-schedule 1f1b",
    "repeated experts in pairs": f"{EXPERTS} {IN_PAIRS} {REPEATED} --sequence-splits 2 --sequence-split-strategy even",
    # Eight chunks, eight data-parallel ranks.
    "partitioned state": f"""--num-layers 16 --hidden-size 256 --ffn-hidden-size 1024 --vocab-size 511 --seq-length 64
        --global-batch-size 32 {CHUNKS} --pipeline-schedule breadth-first --use-distributed-optimizer
        --overlap-grad-reduce --overlap-param-gather --bf16 --partition-state""",
}
RARELY = {"here", "all of layers there", "by heads there", "by heads", "experts in pairs", "whole sequences in pairs"}


@pytest.mark.parametrize("case", few_of(PLANNED, PLANNED.keys() - RARELY))
def test_the_planner_counts_the_same_memory(launch, tmp_path, case):
    flags = [*TWO_STAGES, *PLANNED[case].split()]
    stages = stages_of(launch, 16, *flags, output=tmp_path)
    given = read_launch([*map(str, (*MODEL, *flags))])
    machine, has_shares = read_machine("a100-80gb"), given.partition_state
    sizes = given.seq_length, given.global_batch_size
    setup = candidate_of_launch(
        given, Question(model_of(given), machine, 16, *sizes, partitions_state=has_shares)
    ).setup
    schedule = build(setup.family, setup.shape, pairs=setup.has_pairs)
    tolerance = 0.03 if setup.has_pairs else 0.02
    tolerance_of_host = 0.02
    if setup.moves_by_layer:  # a layer counts as a whole while it runs; the head's part comes back with the last layer
        tolerance = 0.03
        tolerance_of_host = 0.03
    for rank, (order, rehearsed) in enumerate(zip(schedule.ranks, stages, strict=True)):
        by_layer = setup.moves_by_layer
        order = with_moves(order, units_to_move(order, setup.offloads, by_layer=by_layer), by_layer=by_layer)
        planned = rank_memory(setup, order, rank, schedule.paired)
        step = [moment for moment in rehearsed["moments"] if moment["name"] != "build"]
        counted = fullest(step)
        assert planned.total - planned.reserved == pytest.approx(counted["in all"], rel=tolerance), rank
        assert host_bytes(setup, order) == pytest.approx(rehearsed["host_bytes"], rel=tolerance_of_host), rank
        if has_shares:  # at most 2/8 + 1/8 of weights and gradients are there
            assert planned.weights == pytest.approx(counted["weights"], rel=0.02), rank
            assert planned.gradients == pytest.approx(counted["gradients"], rel=0.02), rank
            most = sum(max(each["peak"].get(name, 0) for each in step) for name in ("weights", "gradients"))
            whole = rank_memory(replace(setup, partitions_state=False), order, rank)
            assert most < 0.45 * (whole.weights + whole.gradients)


def test_a_plan_that_moves_activations_fits_its_rehearsal(launch, tmp_path, monkeypatch, capsys):
    """GELU with biases on two devices that only a pipeline can share: nine heads, and an odd number of tokens."""
    jobs = []

    def run(command, env):
        flags = [*command[2:], "--device", "cuda", "--dry-run-output", tmp_path]
        jobs.append(launch(1, flags, Path(command[1]), env={"WORLD_SIZE": env["WORLD_SIZE"]}, timeout=400))
        return SimpleNamespace(returncode=jobs[0].code)

    monkeypatch.setattr(plan.subprocess, "run", run)
    words = f"""--gpus 2 --machine h100-80gb --device-memory 20 --host-memory 40 --best 1
        --json {tmp_path / "plan.json"} --rehearse {PRETRAIN}
        --num-layers 8 --hidden-size 1152 --num-attention-heads 9 --vocab-size 4095 --seq-length 262143
        --max-position-embeddings 262143 --position-embedding-type rope --untie-embeddings-and-output-weights
        --global-batch-size 1 --bf16 --attention-dropout 0 --hidden-dropout 0 --mock-data
        --tokenizer-type NullTokenizer --train-iters 5 --lr 1e-3 --eval-iters 0 --num-workers 0
        --no-create-attention-mask-in-dataloader"""
    code, printed = commands.main(["plan", *words.split()]), capsys.readouterr().out
    assert code == 0 and "Memory: fits. " in jobs[0].log, jobs[0].log[-3000:]
    (best,) = json.loads((tmp_path / "plan.json").read_text())["plans"]
    planned = re.findall(r"= (\S+) weights, gradients, optimizer \+ (\S+) activations", printed)
    stages = json.loads((tmp_path / "rehearsal.json").read_text())["pipeline_ranks"]
    counted = [(stage["needed"] - stage["outside"]) / GIB for stage in stages]
    assert [sum(map(float, each)) for each in planned] == pytest.approx(counted, rel=0.02)
    assert 0 < best["host_gib"] == pytest.approx(max(stage["host_bytes"] for stage in stages) / GIB, rel=0.02)


EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --swiglu --disable-bias-linear --reset-attention-mask "
    "--reset-position-ids --moe-token-dispatcher-type"
)
OF_EXPERTS = (
    "EP 2",
    "the router: each of the 4 experts gets the same number of tokens.",
    "the documents: each sequence holds documents of 204, 153, 102 and 53 tokens.",
)
SHARED = "--context-parallel-size 2 --cp-comm-type"
HYBRID = (
    "--hybrid-layer-pattern G-|*M --swiglu --disable-bias-linear --linear-num-key-heads 4 --linear-num-value-heads 8 "
    "--linear-key-head-dim 16 --linear-value-head-dim 16 --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 "
    "--mamba-state-dim 16 --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
)
UNITS = "--unit-tokens 48 --micro-batch-size 1 --calculate-per-token-loss --dataloader-inter-document-masking"
# Flags, and what is reported besides the memory.
LAUNCHES = {
    "allgather": (f"{EXPERTS} allgather", OF_EXPERTS),
    "alltoall": (f"{EXPERTS} alltoall --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion", OF_EXPERTS),
    "v": (f"{SHARED} a2a {CHUNKS} --pipeline-placement v", ["(TP 1 × PP 2 × CP 2 × DP 1)"]),
    "prediction-heads": (f"{SHARED} all_gather --mtp-num-layers 1", ["(TP 1 × PP 2 × CP 2 × DP 1)"]),
    "units": (UNITS, ["in units of at most 48 tokens", "the first of a step is one document."]),
    "megatrons-own": ("", ["Megatron's own 1F1B", "both ends of each agree on their number, order"]),
    "hybrid": (HYBRID, ["the kernels of recurrent layers by plain PyTorch, which keeps more for the backward."]),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_is_not_a_plain_gpt(launch, name):
    words, found = LAUNCHES[name]
    is_hybrid = name == "hybrid"  # its pattern has the number of layers
    flags = [*MODEL[2 * is_hybrid :], *TWO_STAGES, "--device", "cuda", "--bf16", *words.split()]
    flags += [] if name in ("units", "megatrons-own") else ["--sequence-splits", 2]
    script = ROOT / ("pretrain_hybrid.py" if is_hybrid else "pretrain_gpt.py")
    log = launch(1, [*flags, "--dry-run"], script, env={"WORLD_SIZE": "4"}, timeout=400).check().log
    assert all(each in log for each in ("Memory: fits. ", *found)), log[-3000:]


def test_ends_that_disagree_fail(launch):
    script = FUNCTIONAL_TESTS / "scripts" / "unmatched_messages_script.py"
    words = "--sequence-splits 4 --sequence-split-strategy even --device cpu --dry-run"
    job = launch(1, [*MODEL, *TWO_STAGES, *words.split()], script, env={"WORLD_SIZE": "2"}, timeout=400)
    assert job.code == 1
    moment = "after the forward of stage 0 for segment 0 of micro-batch 0"
    assert f"is sent as float32 [127, 1, 64] {moment}, but received as float32 [128, 1, 64] at the start" in job.log
    assert "error: message 1 from rank 0 to rank 1 (activations from even to higher pipeline ranks)" in job.log
    assert "error: 16 messages are sent from rank 1 to rank 0 (gradients from odd to lower pipeline ranks)" in job.log


def test_both_launch_scripts_rehearse(launch, tmp_path):
    words = ["--seq-length", "128", "--num-layers", "2"]
    scripts = ("scripts/pretrain.sh", "scripts/slurm/pretrain.sbatch")
    start, same = (started(["bash", script, *words], tmp_path, DRY_RUN="1", MODEL_SIZE="tiny") for script in scripts)
    assert start == same
    job = launch(1, start.flags, start.script, env={"WORLD_SIZE": str(start.world_size)}, timeout=400).check()
    # Attention and MLP count as layers of a pattern.
    assert "Rehearsed: 4 layers of " in job.log and "Memory: fits." in job.log
