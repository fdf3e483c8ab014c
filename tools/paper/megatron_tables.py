"""Megatron-LM: SC21 table 1 (arXiv 2104.04473) and recomputation (arXiv 2205.05198, table 5 and figure 1)."""

from collections.abc import Iterator
from pathlib import Path

from megatron.seq1f1b.costs.machine import GIB, read_machine
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.step_memory import rank_memory
from megatron.seq1f1b.schedule import Placement, build

from .programs import PaperSetup
from .row import REFERENCE, Line, Row, check_devices, gpt, known, measured, read

# Scores in memory, blocking messages, gradients summed in 16 bit; the reduction in the backward of the
# tensor-parallel layers was put beside weight gradients after SC21.
_SC21 = dict(
    flash_attention=False, overlaps_messages=False, overlaps_tensor_parallel=False, gradient_bytes=2, dropout=True
)
_RECOMPUTES = {"none": "none", "selective": "core_attn", "full": "full"}
_LATER = dict(flash_attention=False, overlaps_messages=False, gradient_bytes=2, dropout=True)


def sc21_setup(row: Line) -> PaperSetup:
    return PaperSetup(
        model=gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]), int(row["vocab"])),
        sequence_length=int(row["seqlen"]),
        num_microbatches=int(row["micro_batches_derived"]),
        micro_batch_size=int(row["micro_batch_from_repo"]),
        tensor_parallel=int(row["tensor_parallel"]),
        data_parallel=int(row["data_parallel_derived"]),
        placement=Placement(int(row["pipeline_parallel"]), int(row["v_derived"] or 1)),
        recompute="full",
        tied_embeddings=True,
        **_SC21,
    )


def sc21(folder: Path = REFERENCE) -> Iterator[Row]:
    machine = read_machine("a100-80gb")
    for row in read("megatron_sc21_table1", folder):
        setup = sc21_setup(row)
        check_devices(row, "gpus", setup)
        step = predict(setup, machine)
        yield Row(
            table="Megatron SC21 table 1",
            label=f"{row['params_B']}B, {row['gpus']} GPUs",
            unit="s",
            published=measured(row["iteration_s_derived_eq3"]),
            predicted=step.seconds,
            step=step,
            setup=setup,
            machine=machine,
        )


def recomputation(folder: Path = REFERENCE) -> Iterator[Row]:
    return _recomputation(folder, "megatron_recompute_table5", "Megatron recomputation table 5")


def further_recomputation(folder: Path = REFERENCE) -> Iterator[Row]:
    """Rows that no constant is fitted on."""
    return _recomputation(folder, "megatron_recompute_table5_further", "Megatron recomputation table 5, further")


def _recomputation(folder: Path, source: str, table: str) -> Iterator[Row]:
    machine = read_machine("a100-80gb")
    for row in read(source, folder):
        setup = _later_setup(row)
        check_devices(row, "gpus", setup)
        step = predict(setup, machine)
        label = f"{row['model']}, {row['recompute']}"
        yield Row(
            table=table,
            label=label,
            unit="s",
            published=measured(row["iteration_s"]),
            predicted=step.seconds,
            step=step,
            setup=setup,
            machine=machine,
        )


def activations(folder: Path = REFERENCE) -> Iterator[Row]:
    """Of the first stage, which the paper counts, keys and values included, by its formulas."""
    for row in read("megatron_activations_figure1", folder):
        setup = _later_setup(row)
        check_devices(row, "gpus", setup)
        memory = rank_memory(setup, build(setup.family, setup.shape).ranks[0], 0)
        label = f"{row['model']}, {row['recompute']}"
        predicted = (memory.activations + memory.keys_values) / GIB
        yield Row(
            table="Megatron activations, figure 1",
            label=label,
            unit="GiB",
            published=measured(row["activations_GiB"]),
            predicted=predicted,
            setup=setup,
        )


def _later_setup(row: Line) -> PaperSetup:
    return PaperSetup(
        model=gpt(int(row["num_layers"]), int(row["hidden_size"]), int(row["num_heads"]), int(row["vocab_size"])),
        sequence_length=int(row["seq_length"]),
        num_microbatches=row.quotient("global_batch", "dp", "micro_batch"),
        micro_batch_size=int(row["micro_batch"]),
        tensor_parallel=int(row["tp"]),
        data_parallel=int(row["dp"]),
        placement=Placement(int(row["pp"]), int(row["virtual_stages"])),
        recompute=known(_RECOMPUTES, row["recompute"]),
        sequence_parallel=row.is_set("sequence_parallel"),
        tied_embeddings=True,
        **_LATER,
    )
