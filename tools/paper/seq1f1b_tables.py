"""Seq1F1B (arXiv 2406.03488): the authors' throughput and memory, and runs of their code by others."""

from collections.abc import Iterator

from megatron.seq1f1b.costs.flops import authors_flops
from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.memory import GIB
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.training_setup import Software, TrainingSetup
from megatron.seq1f1b.partition import uniform_comp
from megatron.seq1f1b.planner.presets import gpt
from megatron.seq1f1b.schedule import Placement
from megatron.seq1f1b.simulator import Prediction, predict

from .row import Row, read

_SOFTWARE = Software(overlaps_messages=False, concatenates_prefix=True)
_SEGMENTS = 4
# Layers, hidden size, heads, tensor parallel, pipeline parallel (seq1f1b_model_configs.csv).
MODELS = {
    "2.7B": (32, 2560, 32, 1, 8),
    "7B": (32, 4096, 32, 8, 4),
    "13B": (40, 5120, 40, 8, 4),
    "30B": (64, 6144, 64, 8, 8),
}
# Chunks of each method. Their number is not published; the authors' exp.sh tries 2 and 4. Memory gives it away: Seq1F1B
# holds 56 layers of a segment on rank 0 of 7B, Seq1F1B-I as many with 2 chunks and 44 with 4; it took 18 % less.
_CHUNKS = {"1F1B": 1, "1F1B-I": 2, "Seq1F1B": 1, "Seq1F1B-I": 4}
METHODS = tuple(_CHUNKS)


def setup_of(
    model: ModelShape,
    length: int,
    microbatches: int,
    tensor: int,
    pipeline: int,
    method: str,
    segments: int = _SEGMENTS,
    data: int = 1,
) -> TrainingSetup:
    cut = uniform_comp(length, segments, *authors_flops(model), tensor) if method.startswith("Seq") else (length,)
    return TrainingSetup(
        model=model,
        sequence_length=length,
        num_microbatches=microbatches,
        tensor_parallel=tensor,
        data_parallel=data,
        placement=Placement(pipeline, _CHUNKS[method]),
        segments=cut,
        sequence_parallel=tensor > 1,
        distributed_optimizer=True,
        software=_SOFTWARE,
    )


def _of_paper(row: dict[str, str], microbatches: int) -> TrainingSetup:
    layers, hidden, heads, tensor, pipeline = MODELS[row["model"]]
    model = gpt(layers, hidden, heads, 32768)
    return setup_of(model, int(row["seqlen"]), microbatches, tensor, pipeline, row["method"])


def throughput() -> Iterator[Row]:
    """The row that its source prints wrong (its TFLOPS and its tokens/s contradict each other) is left out."""
    machine = read_machine("a100-seq1f1b")
    for row in read("seq1f1b_7b_32gpu_throughput"):
        published = row["throughput_tok_s"]
        if row["note"].startswith("INCONSISTENT"):
            continue
        setup = _of_paper(row, int(row["micro_batches"]))
        prediction = predict(setup, machine)
        group = f"{row['model']}, {row['seqlen']} tokens, {row['micro_batches']} micro-batches"
        yield Row(
            "Seq1F1B 7B throughput",
            f"{group}, {row['method']}",
            "tokens/s",
            None if published == "OOM" else float(published),
            prediction.tokens_per_second if prediction.fits else None,
            group=group,
            setup=setup,
            machine=machine,
        )


def memory() -> Iterator[Row]:
    machine = read_machine("a100-seq1f1b")
    for row in read("seq1f1b_memory_gb"):
        published = row["mem_max_over_stages_GiB"]
        setup = _of_paper(row, 16)
        yield Row(
            "Seq1F1B memory",
            f"{row['model']}, {row['seqlen']} tokens, {row['method']}",
            "GiB",
            None if published == "OOM" else float(published),
            _largest(predict(setup, machine)),
            setup=setup,
            machine=machine,
        )


def _largest(prediction: Prediction) -> float | None:
    return max(each.total for each in prediction.memory) / GIB if prediction.fits else None


def third_party() -> Iterator[Row]:
    machine = read_machine("a100-seq1f1b")
    for row in read("third_party_seq1f1b_logs"):
        heads, hidden, segments = int(row["num_attention_heads"]), int(row["hidden_size"]), int(row["pipe_sp_splits"])
        setup = setup_of(
            gpt(int(row["num_layers"]), hidden, heads, int(row["padded_vocab_size"])),
            int(row["seq_length"]),
            int(row["micro_batches_per_replica"]),
            int(row["tensor_model_parallel_size"]),
            int(row["pipeline_model_parallel_size"]),
            "Seq1F1B" if segments > 1 else "1F1B",
            segments,
            int(row["data_parallel_size"]),
        )
        prediction = predict(setup, machine)
        label = row["log"].removesuffix(".log")
        seconds = float(row["step_time_s_mean_pm_std"].split("±")[0])
        yield Row("Seq1F1B third-party runs", label, "s", seconds, prediction.seconds, setup=setup, machine=machine)
        for stage, published in enumerate(row["mem_reserved_GiB_per_stage"].split("/")):
            yield Row(
                "Seq1F1B third-party memory",
                f"{label}, stage {stage}",
                "GiB",
                float(published),
                prediction.memory[stage].total / GIB,
                setup=setup,
                machine=machine,
            )
