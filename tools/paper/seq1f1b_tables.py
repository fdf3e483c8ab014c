"""Seq1F1B (arXiv 2406.03488): the authors' throughput and memory, and runs of their code by others."""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

from megatron.seq1f1b.costs.blocks import paper_flops
from megatron.seq1f1b.costs.machine import GIB, read_machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.step_memory import rank_memory
from megatron.seq1f1b.partition import uniform_comp
from megatron.seq1f1b.schedule import Placement, build

from .programs import PaperSetup
from .row import REFERENCE, Line, Row, check_devices, fits, gpt, known, measured, read

# Kernels of Megatron's code of 2023 are fused by nvFuser, which PyTorch 2.2 no longer has.
_PROGRAM = dict(overlaps_messages=False, concatenates_prefix=True, fuses_kernels=False, frees_late=True)
_SEGMENTS = 4
_SEQUENCES_OF_THIRD_PARTY = 8  # in a step
# Layers, hidden size, heads, tensor parallel, pipeline parallel (seq1f1b_model_configs.csv).
MODELS = {
    "2.7B": (32, 2560, 32, 1, 8),
    "7B": (32, 4096, 32, 8, 4),
    "13B": (40, 5120, 40, 8, 4),
    "30B": (64, 6144, 64, 8, 8),
}
# Chunks of each method. Those of Seq1F1B-I are not published; the authors' exp.sh tries 2 and 4. Its times are those of
# four, its memory is that of two, which takes up to 15 % less time; see MISSES in paper_tables.py.
_CHUNKS = {"1F1B": 1, "1F1B-I": 2, "Seq1F1B": 1, "Seq1F1B-I": 4}
_CHUNKS_OF_MEMORY = 2
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
    chunks: int | None = None,
) -> PaperSetup:
    cut = uniform_comp(length, segments, *paper_flops(model), tensor) if method.startswith("Seq") else (length,)
    return PaperSetup(
        model=model,
        sequence_length=length,
        num_microbatches=microbatches,
        tensor_parallel=tensor,
        data_parallel=data,
        placement=Placement(pipeline, chunks or _CHUNKS[method]),
        segments=cut,
        sequence_parallel=tensor > 1,
        distributed_optimizer=True,
        **_PROGRAM,
    )


def _of_paper(row: Line, microbatches: int, chunks: int | None = None) -> PaperSetup:
    layers, hidden, heads, tensor, pipeline = known(MODELS, row["model"])
    model = gpt(layers, hidden, heads, 32768)
    known(_CHUNKS, row["method"])
    return setup_of(model, int(row["seqlen"]), microbatches, tensor, pipeline, row["method"], chunks=chunks)


def throughput(folder: Path = REFERENCE) -> Iterator[Row]:
    """The row that its source prints wrong (its TFLOPS and its tokens/s contradict each other) is left out."""
    machine = read_machine("a100-seq1f1b")
    for row in read("seq1f1b_7b_32gpu_throughput", folder):
        if row["note"].startswith("INCONSISTENT"):
            continue
        setup = _of_paper(row, int(row["micro_batches"]))
        check_devices(row, "gpus", setup)
        step = predict(setup, machine)
        group = f"{row['model']}, {row['seqlen']} tokens, {row['micro_batches']} micro-batches"
        yield Row(
            table="Seq1F1B 7B throughput",
            label=f"{group}, {row['method']}",
            unit="tokens/s",
            published=measured(row["throughput_tok_s"]),
            predicted=step.tokens_per_second if fits(step) else None,
            step=step,
            group=group,
            setup=setup,
            machine=machine,
        )


def memory(folder: Path = REFERENCE) -> Iterator[Row]:
    """Of the fullest stage."""
    return _memory(folder, "seq1f1b_memory_gb", "mem_max_over_stages_GiB", "Seq1F1B memory", max)


def mean_memory(folder: Path = REFERENCE) -> Iterator[Row]:
    """Of all stages on average, for more models."""
    return _memory(
        folder, "seq1f1b_memory_mean", "mem_mean_over_stages_GiB", "Seq1F1B memory, mean of the stages", mean
    )


def _memory(
    folder: Path, source: str, column: str, table: str, of_stages: Callable[[list[float]], float]
) -> Iterator[Row]:
    machine = read_machine("a100-seq1f1b")
    for row in read(source, folder):
        setup = _of_paper(row, 16, _CHUNKS_OF_MEMORY if row["method"] == "Seq1F1B-I" else None)
        schedule = build(setup.family, setup.shape)
        sizes = [rank_memory(setup, schedule.ranks[rank], rank).total / GIB for rank in range(setup.pipeline_parallel)]
        yield Row(
            table=table,
            label=f"{row['model']}, {row['seqlen']} tokens, {row['method']}",
            unit="GiB",
            published=measured(row[column]),
            predicted=of_stages(sizes) if max(sizes) <= machine.device.memory_gib else None,
            setup=setup,
            machine=machine,
        )


def third_party(folder: Path = REFERENCE) -> Iterator[Row]:
    machine = read_machine("a100-seq1f1b")
    for row in read("third_party_seq1f1b_logs", folder):
        heads = int(row["num_attention_heads"])
        hidden = int(row["hidden_size"])
        segments = int(row["pipe_sp_splits"])
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
        check_devices(row, "gpus", setup)
        label = row["log"].removesuffix(".log")
        seconds = float(row["step_time_s_mean_pm_std"].split("±")[0])
        yield Row(
            table="Seq1F1B third-party runs",
            label=label,
            unit="s",
            published=seconds,
            predicted=prediction.seconds,
            setup=setup,
            machine=machine,
        )
        for stage, published in enumerate(row["mem_reserved_GiB_per_stage"].split("/")):
            yield Row(
                table="Seq1F1B third-party memory",
                label=f"{label}, stage {stage}",
                unit="GiB",
                published=float(published),
                predicted=prediction.memory[stage].total / GIB,
                setup=setup,
                machine=machine,
            )


def third_party_setup(row: Line) -> PaperSetup:
    """Of a row of `third_party_allocator`."""
    segments = int(row["pipe_sp_splits"])
    data = int(row["data_parallel_size"])
    sizes = (int(row[name]) for name in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"))
    return setup_of(
        gpt(*sizes),
        int(row["seq_length"]),
        _SEQUENCES_OF_THIRD_PARTY // data,
        int(row["tensor_model_parallel_size"]),
        int(row["pipeline_model_parallel_size"]),
        "Seq1F1B" if segments > 1 else "1F1B",
        segments,
        data,
    )


def allocated(folder: Path = REFERENCE) -> Iterator[Row]:
    """The peak of what is allocated, by the counter of PyTorch's allocator, in the first iteration: before it Adam has
    no moments."""
    machine = read_machine("a100-seq1f1b")
    for row in read("third_party_allocator", folder):
        setup = third_party_setup(row)
        stage = row.index("stage")
        memory = rank_memory(setup, build(setup.family, setup.shape).ranks[stage], stage)
        moments = memory.optimizer * 2 / 3
        yield Row(
            table="Seq1F1B third-party memory, allocated",
            label=f"{row['log'].removesuffix('.log')}, stage {stage}",
            unit="GiB",
            published=float(row["max_allocated_MiB_iteration_1"]) / 1024,
            predicted=(memory.total - memory.reserved - moments) / GIB,
            setup=setup,
            machine=machine,
        )
