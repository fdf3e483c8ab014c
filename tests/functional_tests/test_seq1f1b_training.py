"""pretrain_gpt.py with our flags trains and evaluates like Megatron's own schedule without them: every kind of model,
beside every kind of parallelism; and pretrain_hybrid.py hybrid models."""

import itertools
import re
from functools import cache
from pathlib import Path

import pytest

from megatron.seq1f1b.files.schedule_file import write_schedule
from megatron.seq1f1b.files.timeline_file import read_timeline
from megatron.seq1f1b.schedule import Kind, Placement, Shape, build, moved
from support.launch import ITERATIONS, PRETRAIN, ROOT, TINY_GPT
from support.on_ranks import few_of

OVERLAY = ROOT / "megatron" / "seq1f1b" / "__main__.py"
FOREIGN = Path(__file__).parent / "scripts" / "foreign_script.py"
MODEL = (*TINY_GPT, "--mock-data", "--eval-iters", "1", "--eval-interval", "2")
PIPELINE = (*MODEL, "--pipeline-model-parallel-size", "2")

LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --qk-layernorm --normalization RMSNorm --position-embedding-type none --rope-type yarn"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --disable-bias-linear --moe-z-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 32"
)
SHARED_EXPERTS = "--expert-model-parallel-size 2 --use-distributed-optimizer"
BALANCED = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
BIASED = "--moe-router-load-balancing-type none --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
PREDICTION = "--mtp-num-layers 2 --untie-embeddings-and-output-weights --position-embedding-type rope"
RECURRENT = (
    "--hybrid-layer-pattern G-|*M --swiglu --disable-bias-linear --position-embedding-type rope "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 16 --linear-value-head-dim 16 "
    "--mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16"
)
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
IN_CHUNKS = (
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule breadth-first"
)
SPREAD_EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --swiglu --disable-bias-linear"
)
CHUNKS = f"{OVERLAP} --num-layers-per-virtual-pipeline-stage 1"
FOUR = "--sequence-splits 4"
IN_PAIRS = "--overlap-moe-expert-parallel-comm"
BALANCED_FOUR = f"{FOUR} --sequence-split-strategy balanced"
# Ranks in a pipeline of two, flags of both runs, flags of ours.
RUNS = {
    "one micro-batch a unit": (2, "", "--pipeline-schedule 1f1b"),
    "the authors' flags": (2, "", "--pipe-sp-splits 3 --pipe-sp-strategy uniform_comp"),
    "multi-latent attention": (2, LATENT, BALANCED_FOUR),
    "experts with a bias": (2, f"{EXPERTS} {BIASED}", BALANCED_FOUR),
    "expert parallel": (4, f"{EXPERTS} {BALANCED} {SHARED_EXPERTS} --moe-grouped-gemm", BALANCED_FOUR),
    "pairs": (4, f"{EXPERTS} {BALANCED} {SHARED_EXPERTS}", f"{BALANCED_FOUR} {IN_PAIRS}"),
    "pairs, chunks": (4, f"{CHUNKS} {EXPERTS} {SHARED_EXPERTS}", f"--sequence-splits 2 {IN_PAIRS}"),
    # The embedding and the loss on stages of their own, and the two chunks between them not alike.
    "layout": (2, "--pipeline-model-parallel-layout E|t|ttt|L", BALANCED_FOUR),
    "prediction before the loss": (2, f"{PREDICTION} --pipeline-model-parallel-layout Ettttmm|L", BALANCED_FOUR),
    "hybrid": (2, RECURRENT, FOUR),
    "bf16": (2, "--bf16", FOUR),
    # Tensor-parallel ranks without data allocate by segment.
    "TP 2 with SP": (4, "--tensor-model-parallel-size 2 --sequence-parallel", "--sequence-splits 3"),
    **{
        f"chunks, {name}": (4, CHUNKS, f"--pipeline-schedule {name} --sequence-splits 2")
        for name in ("1f1b", "zb-h1", "breadth-first")
    },
}
RARE = ("pairs, chunks", "one micro-batch a unit", "the authors' flags", "chunks, 1f1b", "chunks, breadth-first")
# What is logged besides the loss, where flags have these words.
LOGGED = {"z_loss": "z-loss", "load_balancing_loss": "aux_loss", "mtp_1 loss": "--mtp", "mtp_2 loss": "--mtp"}


def assert_same_losses(ours, own, flags=""):
    # Evaluations are before, between and after training steps.
    assert len(own.losses()) == ITERATIONS and len(own.losses("lm loss value")) >= 3
    for kind in ("lm loss", "lm loss value"):
        tolerance = {"rel": 5e-3} if "--bf16" in flags else {"abs": 1e-5}
        assert ours.losses(kind) == pytest.approx(own.losses(kind), **tolerance)
    for kind, word in LOGGED.items():
        assert len(own.losses(kind)) == (ITERATIONS if word in flags else 0)
        for tolerance in ({"rel": 1e-5}, {"abs": 1e-5}):
            assert ours.losses(kind) == pytest.approx(own.losses(kind), **tolerance)


@pytest.fixture(scope="module")
def trained(launch):
    """The run on so many ranks in a pipeline of two, with these flags."""

    @cache
    def trained(ranks, flags):
        is_hybrid = "hybrid" in flags  # whose pattern has the number of layers
        script = ROOT / "pretrain_hybrid.py" if is_hybrid else PRETRAIN
        return launch(ranks, [*PIPELINE[2 * is_hybrid :], *flags.split()], script).check()

    return trained


@pytest.fixture(scope="module")
def megatrons_own(trained):
    return trained(2, " --attention-backend local")


@pytest.mark.parametrize("name", few_of(RUNS, RUNS.keys() - {*RARE}))
def test_losses_are_those_of_megatrons_own_1f1b(trained, name):
    ranks, flags, ours = RUNS[name]
    assert_same_losses(trained(ranks, f"{flags} {ours}"), trained(ranks, f"{flags} --attention-backend local"), flags)


def test_losses_of_context_parallel_ranks_are_those_of_one(launch):
    """Two tokens more are predicted, whose losses are logged."""
    own = launch(1, [*MODEL, *PREDICTION.split(), "--attention-backend", "local"]).check()
    shared = f"{PREDICTION} {BALANCED_FOUR} --context-parallel-size 2 --cp-comm-type a2a"
    assert_same_losses(launch(2, [*MODEL, *shared.split()]).check(), own, PREDICTION)


LAST_WITHOUT_EXPERTS = {
    "hybrid": (2, "--hybrid-layer-pattern *E|*-"),
    "TP 2": (4, "--moe-layer-freq [1]*2+[0]*2 --tensor-model-parallel-size 2 --sequence-parallel"),
}


@pytest.mark.parametrize("name", few_of(LAST_WITHOUT_EXPERTS, LAST_WITHOUT_EXPERTS))
def test_what_is_logged_of_experts(trained, name):
    """By a last rank without any, too, where Megatron averages over tensor-parallel ranks what segments sum."""
    ranks, layers = LAST_WITHOUT_EXPERTS[name]
    flags = f"{EXPERTS} {BALANCED} {layers}"
    assert_same_losses(trained(ranks, f"{flags} {FOUR}"), trained(ranks, f"{flags} --attention-backend local"), flags)


@pytest.mark.parametrize("align", ["", pytest.param("--no-align-param-gather", marks=pytest.mark.exhaustive)])
def test_a_chunk_reduces_while_the_other_goes_backward(launch, tmp_path, align):
    """Also its parameters are gathered before its first forward ends; all of it is in the trace."""
    flags = f"{CHUNKS} --pipeline-schedule breadth-first --sequence-splits 2 --global-batch-size 16 {align}"
    trace = ("--eval-iters", 0, "--pipeline-trace", tmp_path, "--pipeline-trace-iterations", 3)
    launch(4, [*PIPELINE, *flags.split(), *trace]).check()
    traces = [read_timeline(tmp_path / f"iteration-3-pipeline-{first}.json") for first in (0, 1)]
    for timeline, rank in itertools.product(traces, range(2)):
        first, last = timeline.shape.placement.stages_of(rank)
        by_action = {str(span.action): span for span in timeline.ranks[rank]}
        backwards = [span for span in timeline.ranks[rank] if span.action.kind is Kind.B]
        assert by_action[f"{last}REDUCE"].start < max(span.end for span in backwards if span.action.stage == first)
        assert by_action[f"{first}REDUCE"].end > by_action[f"{last}REDUCE"].start
        for stage in (first, last):
            gather = by_action[f"{stage}GATHER"]
            assert gather.start < gather.end <= by_action[f"{stage}F0.0"].end
            assert align or gather.start < by_action[f"{first}F0.1"].start
    assert len({len(spans) for timeline in traces for spans in timeline.ranks}) == 1


PARTITIONED = {
    "breadth-first": f"{IN_CHUNKS} --sequence-splits 2 --eval-iters 1 --eval-interval 3",
    "without overlap": f"{IN_CHUNKS} {SPREAD_EXPERTS} --no-overlap",
    "bf16": f"{IN_CHUNKS} --bf16",
    "one chunk, DP 4": "--pipeline-schedule 1f1b --sequence-splits 4",
    "V": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-placement v "
    "--pipeline-schedule auto",
    "zb-h1": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule zb-h1",
    "TP 2 with SP": "--pipeline-schedule 1f1b --tensor-model-parallel-size 2 --sequence-parallel --sequence-splits 2",
    "CP 2": "--pipeline-schedule 1f1b --context-parallel-size 2 --cp-comm-type a2a --sequence-splits 2 "
    "--no-create-attention-mask-in-dataloader",
    "experts": f"{IN_CHUNKS} {SPREAD_EXPERTS}",
    "recomputation": f"{IN_CHUNKS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "loss per token": f"{IN_CHUNKS} --calculate-per-token-loss",
    "offload": f"{IN_CHUNKS} --offload-activations 1",
}


@pytest.mark.parametrize("case", few_of(PARTITIONED, ("TP 2 with SP", "bf16")))
def test_a_partitioned_state_trains_as_a_whole_one(launch, case):
    """The same losses and gradient norms, digit for digit, of six steps of Adam."""
    flags = PARTITIONED[case].split()
    overlap = OVERLAP.split()[: 1 if "--no-overlap" in flags else 3]
    flags = [*TINY_GPT, "--mock-data", *overlap, "--train-iters", "6", *(f for f in flags if f != "--no-overlap")]
    whole, partitioned = (launch(4, [*flags, *more]).check() for more in ((), ("--partition-state",)))
    assert partitioned.losses() == whole.losses()
    assert partitioned.losses("grad norm") == whole.losses("grad norm") and len(whole.losses("grad norm")) == 6
    assert partitioned.losses("lm loss value") == whole.losses("lm loss value")


def test_a_schedule_from_a_file(launch, megatrons_own, tmp_path):
    """Its moves go over the link that is measured."""
    write_schedule(moved(build("zb-h1", Shape(Placement(2), 4, 2)), 1.0), tmp_path / "mine.csv")
    flags = ["--pipeline-schedule-file", tmp_path / "mine.csv", "--sequence-splits", "2"]
    job = launch(2, [*PIPELINE, *flags]).check()
    assert_same_losses(job, megatrons_own)
    rate, need = re.findall(r"([\d.e+-]+) GB/s", job.log)
    assert float(rate) > 0 and float(need) > 0


@pytest.mark.parametrize("flags, segments", [([], 1), (["--sequence-splits", "4"], 4)], ids=["Megatron's own", "ours"])
def test_a_trace_has_every_forward_and_backward(launch, tmp_path, flags, segments):
    trace = ["--pipeline-trace", tmp_path, "--pipeline-trace-iterations", "2", "3"]
    launch(2, [*PIPELINE, *trace, *flags]).check()
    assert {path.name for path in tmp_path.iterdir()} == {f"iteration-{i}-pipeline-0.json" for i in (2, 3)}
    timeline = read_timeline(tmp_path / "iteration-3-pipeline-0.json")
    assert (timeline.shape.num_microbatches, timeline.shape.num_segments) == (4, segments)
    for rank, spans in enumerate(timeline.ranks):
        assert len(spans) == len(set(span.action for span in spans)) == 2 * 4 * segments
        assert all(span.action.stage == rank for span in spans)
        assert all(0 <= a.start <= a.end <= b.start for a, b in itertools.pairwise(spans))
    assert len(timeline.meta["peak_memory_bytes"]) == 2 and timeline.meta["schedule"]
    assert not flags or (len(timeline.meta["segment_lengths"]) == 4 and sum(timeline.meta["segment_lengths"]) == 64)


def test_a_script_that_does_not_know_our_flags(launch, megatrons_own):
    """`python -m megatron.seq1f1b SCRIPT`; without the spec of pretrain_gpt.py, whose layers have our attention."""
    flags = [FOREIGN, *PIPELINE, *FOUR.split()]
    job = launch(2, flags, script=OVERLAY).check()
    assert_same_losses(job, megatrons_own)
    refused = launch(2, [*flags, "--qk-clip"], script=OVERLAY)
    assert refused.code != 0 and refused.log.count("error: ") == refused.log.count("error: --qk-clip ") == 1
    assert launch(2, flags, script=OVERLAY, env={"SEPARATELY": "1"}).check().losses() == job.losses()


def test_such_a_script_with_chunks_in_a_v_or_context_parallelism(launch, tmp_path):
    """It asks Megatron for its rank, not for its chunk, and ties the embedding by ranks of its own."""
    chunks = [FOREIGN, *PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2", "--sequence-splits", "2"]
    saved = launch(2, [*chunks, "--save", tmp_path / "saved", "--save-interval", "2"], script=OVERLAY).check()
    in_a_v = ("--pipeline-schedule", "auto", "--pipeline-placement", "v", "--load", tmp_path / "saved")
    again = launch(2, [*chunks, *in_a_v, "--ckpt-step", "2"], script=OVERLAY).check()
    assert again.losses() == pytest.approx(saved.losses()[2:], abs=1e-5)

    shared = [*TINY_GPT, "--mock-data", "--context-parallel-size", "2", "--cp-comm-type", "a2a"]
    whole = ("--pipeline-schedule", "1f1b")
    expected = launch(2, [*shared, *whole]).check().losses()
    assert launch(2, [FOREIGN, *shared, *whole], script=OVERLAY).check().losses() == pytest.approx(expected, abs=1e-5)
    refused = launch(2, [FOREIGN, *shared, "--sequence-splits", "2"], script=OVERLAY, env={"MASKS": "1"})
    assert refused.code != 0 and "add --no-create-attention-mask-in-dataloader" in refused.log
