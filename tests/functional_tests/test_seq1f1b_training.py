"""pretrain_gpt.py with our flags trains and evaluates like Megatron's own schedule without them."""

import itertools
from pathlib import Path

import pytest

from megatron.seq1f1b.schedule import Kind, Placement, Shape, build, read_timeline, write_csv
from support.few import few_of
from support.launch import ROOT, TINY_GPT

OVERLAY = ROOT / "megatron" / "seq1f1b" / "__main__.py"
PIPELINE = (*TINY_GPT, "--mock-data", "--pipeline-model-parallel-size", "2")
EVALUATE = ("--eval-iters", "2", "--eval-interval", "2")

OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
CHUNKS = (*PIPELINE, *OVERLAP, "--num-layers-per-virtual-pipeline-stage", "1")
IN_CHUNKS = (
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule breadth-first"
)


@pytest.fixture(scope="module")
def chunks_of_megatron(launch):
    return launch(4, [*CHUNKS, "--attention-backend", "local"]).check()


@pytest.fixture(scope="module")
def megatrons_own(launch):
    return launch(2, [*PIPELINE, *EVALUATE, "--attention-backend", "local"]).check()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--pipeline-schedule 1f1b", marks=pytest.mark.exhaustive),
        "--sequence-splits 4",
        pytest.param("--pipe-sp-splits 3 --pipe-sp-strategy uniform_comp", marks=pytest.mark.exhaustive),
        "--pipeline-schedule zb-h1 --sequence-splits 4",
    ],
)
def test_losses_are_those_of_megatrons_own_1f1b(launch, megatrons_own, flags):
    job = launch(2, [*PIPELINE, *EVALUATE, *flags.split()]).check()
    assert job.losses() == pytest.approx(megatrons_own.losses(), abs=1e-5)
    # Before, between and after training steps.
    assert len(job.losses("lm loss value")) >= 3
    assert job.losses("lm loss value") == pytest.approx(megatrons_own.losses("lm loss value"), abs=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        OVERLAP,
    ],
    ids=["TP 2 with SP", "DP 2 with overlap"],
)
def test_beside_other_parallelism(launch, layout):
    """Four ranks: tensor-parallel ranks without data allocate by segment; data-parallel ranks reduce once."""
    own = launch(4, [*PIPELINE, *layout, "--attention-backend", "local"]).check()
    ours = launch(4, [*PIPELINE, *layout, "--sequence-splits", "3"]).check()
    assert ours.losses() == pytest.approx(own.losses(), abs=1e-5)


@pytest.mark.parametrize(
    "schedule", ["zb-h1", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("1f1b", "breadth-first"))]
)
def test_chunks_reduce_and_gather_beside_compute(launch, chunks_of_megatron, schedule):
    ours = launch(4, [*CHUNKS, "--pipeline-schedule", schedule, "--sequence-splits", "2"]).check()
    assert ours.losses() == pytest.approx(chunks_of_megatron.losses(), abs=1e-5)


@pytest.mark.parametrize("align", ["", pytest.param("--no-align-param-gather", marks=pytest.mark.exhaustive)])
def test_a_chunk_reduces_while_the_other_goes_backward(launch, tmp_path, align):
    """Also its parameters are gathered before its first forward ends; all of it is in the trace."""
    flags = [
        "--pipeline-schedule",
        "breadth-first",
        "--sequence-splits",
        "2",
        "--global-batch-size",
        "16",
        *align.split(),
    ]
    launch(4, [*CHUNKS, *flags, "--pipeline-trace", tmp_path, "--pipeline-trace-iterations", "4"]).check()
    traces = [read_timeline(tmp_path / f"iteration-4-pipeline-{first}.json") for first in (0, 1)]
    for timeline, rank in itertools.product(traces, range(2)):
        placement, spans = timeline.shape.placement, timeline.ranks[rank]
        first, last = placement.stages_of(rank)
        by_action = {str(span.action): span for span in spans}
        ends = {
            (span.action.kind, span.action.stage): span.end for span in spans if span.action.kind in (Kind.F, Kind.B)
        }
        assert by_action[f"{last}REDUCE"].start < ends[Kind.B, first]
        assert by_action[f"{first}REDUCE"].end > by_action[f"{last}REDUCE"].start
        for stage in (first, last):
            gather = by_action[f"{stage}GATHER"]
            assert gather.start < gather.end <= by_action[f"{stage}F0.0"].end
            assert align or gather.start < by_action[f"{first}F0.1"].start
    assert len({len(spans) for timeline in traces for spans in timeline.ranks}) == 1


PARTITIONED = {
    "breadth-first": f"{IN_CHUNKS} --sequence-splits 2 --eval-iters 1 --eval-interval 3",
    "without overlap": f"{IN_CHUNKS} --no-overlap",
    "bf16": f"{IN_CHUNKS} --bf16",
    "one chunk, DP 4": "--pipeline-schedule 1f1b --sequence-splits 4",
    "V": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-placement v "
    "--pipeline-schedule auto",
    "zb-h1": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule zb-h1",
    "TP 2 with SP": "--pipeline-schedule 1f1b --tensor-model-parallel-size 2 --sequence-parallel --sequence-splits 2",
    "CP 2": "--pipeline-schedule 1f1b --context-parallel-size 2 --cp-comm-type a2a --sequence-splits 2 "
    "--no-create-attention-mask-in-dataloader",
    "experts": f"{IN_CHUNKS} --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--swiglu --disable-bias-linear",
    "recomputation": f"{IN_CHUNKS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "loss per token": f"{IN_CHUNKS} --calculate-per-token-loss",
}


@pytest.mark.parametrize("case", few_of(PARTITIONED, ("breadth-first", "TP 2 with SP", "bf16")))
def test_a_partitioned_state_trains_as_a_whole_one(launch, case):
    """The same losses and gradient norms, digit for digit, of twenty steps of Adam."""
    flags = PARTITIONED[case].split()
    overlap = OVERLAP[:1] if "--no-overlap" in flags else OVERLAP
    flags = [*TINY_GPT, "--mock-data", *overlap, "--train-iters", "20", *(f for f in flags if f != "--no-overlap")]
    whole, partitioned = (launch(4, [*flags, *more]).check() for more in ((), ("--partition-state",)))
    assert partitioned.losses() == whole.losses()
    assert partitioned.losses("grad norm") == whole.losses("grad norm") and len(whole.losses("grad norm")) == 20
    assert partitioned.losses("lm loss value") == whole.losses("lm loss value")


def test_a_schedule_from_a_file(launch, megatrons_own, tmp_path):
    write_csv(build("zb-h1", Shape(Placement(2), 4, 2)), tmp_path / "mine.csv")
    flags = ["--pipeline-schedule-file", tmp_path / "mine.csv", "--sequence-splits", "2"]
    job = launch(2, [*PIPELINE, *EVALUATE, *flags]).check()
    assert job.losses() == pytest.approx(megatrons_own.losses(), abs=1e-5)
    assert job.losses("lm loss value") == pytest.approx(megatrons_own.losses("lm loss value"), abs=1e-5)
    refused = launch(2, [*PIPELINE, *flags, "--global-batch-size", "4"])
    assert refused.code != 0 and "4 micro-batches, 2 segments, but the other flags are for" in refused.log


def test_bf16_falls_like_megatrons_own(launch):
    own = launch(2, [*PIPELINE, "--bf16"]).check()
    ours = launch(2, [*PIPELINE, "--bf16", "--sequence-splits", "4"]).check()
    assert ours.losses() == pytest.approx(own.losses(), rel=5e-3)


@pytest.mark.parametrize("flags, segments", [([], 1), (["--sequence-splits", "4"], 4)], ids=["Megatron's own", "ours"])
def test_a_trace_has_every_forward_and_backward(launch, tmp_path, flags, segments):
    trace = ["--pipeline-trace", tmp_path, "--pipeline-trace-iterations", "2", "4"]
    launch(2, [*PIPELINE, *trace, *flags]).check()
    assert {path.name for path in tmp_path.iterdir()} == {f"iteration-{i}-pipeline-0.json" for i in (2, 4)}
    timeline = read_timeline(tmp_path / "iteration-4-pipeline-0.json")
    microbatches = 4
    assert (timeline.shape.num_microbatches, timeline.shape.num_segments) == (microbatches, segments)
    for rank, spans in enumerate(timeline.ranks):
        assert len(spans) == len(set(span.action for span in spans)) == 2 * microbatches * segments
        assert all(span.action.stage == rank for span in spans)
        assert all(a.start <= a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))
    assert len(timeline.meta["peak_memory_bytes"]) == 2


def test_a_refusal_is_one_sentence_and_ends_all_ranks(launch):
    job = launch(2, [*PIPELINE, "--sequence-splits", "4", "--qk-clip"], timeout=60)
    assert job.code not in (0, None)
    assert job.log.count("error: ") == 1
    assert "error: --qk-clip needs the largest logit of each head, which takes another product" in job.log


def test_attention_dropout_and_recomputation_that_repeats_it(launch):
    """Megatron's default. Masks differ from Megatron's own, whose random numbers are those of whole sequences."""
    flags = [*PIPELINE, "--sequence-splits", "4"]
    dropout = [*flags, "--attention-dropout", "0.1"]
    without, stored = launch(2, flags).check(), launch(2, dropout).check()
    assert stored.losses() == pytest.approx(without.losses(), rel=0.01)
    assert stored.losses() != without.losses()
    assert stored.log.count("attention dropout on a CPU has no fused kernel") == 1
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    kept = [*full, "--recompute-keeps-attention"]
    for recompute in (full, kept, ["--recompute-granularity", "selective"]):
        assert launch(2, [*dropout, *recompute]).check().losses() == stored.losses()


def test_a_script_that_does_not_know_our_flags(launch, megatrons_own):
    """`python -m megatron.seq1f1b SCRIPT`; without the spec of pretrain_gpt.py, whose layers have our attention."""
    script = Path(__file__).parent / "scripts" / "foreign_script.py"
    job = launch(2, [script, *PIPELINE, *EVALUATE, "--sequence-splits", "4"], script=OVERLAY).check()
    assert job.losses() == pytest.approx(megatrons_own.losses(), abs=1e-5)
    refused = launch(2, [script, *PIPELINE, "--sequence-splits", "4", "--qk-clip"], script=OVERLAY)
    assert refused.code != 0 and "error: --qk-clip " in refused.log
    separately = launch(2, [script, *PIPELINE, "--sequence-splits", "4"], script=OVERLAY, env={"SEPARATELY": "1"})
    assert separately.check().losses() == job.losses()


def test_such_a_script_with_chunks_in_a_v_or_context_parallelism(launch, tmp_path):
    """It asks Megatron for its rank, not for its chunk, and ties the embedding by ranks of its own."""
    script = Path(__file__).parent / "scripts" / "foreign_script.py"
    chunks = [script, *PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2", "--sequence-splits", "2"]
    saved = launch(2, [*chunks, "--save", tmp_path / "saved", "--save-interval", "3"], script=OVERLAY).check()
    in_a_v = ("--pipeline-schedule", "auto", "--pipeline-placement", "v", "--load", tmp_path / "saved")
    again = launch(2, [*chunks, *in_a_v, "--ckpt-step", "3"], script=OVERLAY).check()
    assert again.losses() == pytest.approx(saved.losses()[3:], abs=1e-5)

    shared = [*TINY_GPT, "--mock-data", "--context-parallel-size", "2", "--cp-comm-type", "a2a"]
    whole = ("--pipeline-schedule", "1f1b")
    expected = launch(2, [*shared, *whole]).check().losses()
    assert launch(2, [script, *shared, *whole], script=OVERLAY).check().losses() == pytest.approx(expected, abs=1e-5)
    refused = launch(2, [script, *shared, "--sequence-splits", "2"], script=OVERLAY, env={"MASKS": "1"})
    assert refused.code != 0 and "add --no-create-attention-mask-in-dataloader" in refused.log
