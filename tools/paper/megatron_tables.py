"""Megatron-LM: SC21 table 1 (arXiv 2104.04473) and recomputation table 5 (arXiv 2205.05198)."""

from collections.abc import Iterator

from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.training_setup import Software, TrainingSetup
from megatron.seq1f1b.planner.presets import gpt
from megatron.seq1f1b.schedule import Placement
from megatron.seq1f1b.simulator import predict

from .row import Row, read

# Scores in memory, blocking messages, gradients summed in 16 bit; the reduction in the backward of the
# tensor-parallel layers was put beside weight gradients after SC21.
_SC21 = Software(
    flash_attention=False, overlaps_messages=False, overlaps_tensor_parallel=False, gradient_bytes=2, dropout=True
)
_LATER = Software(flash_attention=False, overlaps_messages=False, gradient_bytes=2, dropout=True)


def sc21_setup(row: dict[str, str]) -> TrainingSetup:
    return TrainingSetup(
        model=gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]), int(row["vocab"])),
        sequence_length=int(row["seqlen"]),
        num_microbatches=int(row["micro_batches_derived"]),
        micro_batch_size=int(row["micro_batch_from_repo"]),
        tensor_parallel=int(row["tensor_parallel"]),
        data_parallel=int(row["data_parallel_derived"]),
        placement=Placement(int(row["pipeline_parallel"]), int(row["v_derived"] or 1)),
        recompute="full",
        tied_embeddings=True,
        software=_SC21,
    )


def sc21() -> Iterator[Row]:
    machine = read_machine("a100-80gb")
    for row in read("megatron_sc21_table1"):
        setup = sc21_setup(row)
        yield Row(
            "Megatron SC21 table 1",
            f"{row['params_B']}B, {row['gpus']} GPUs",
            "s",
            float(row["iteration_s_derived_eq3"]),
            predict(setup, machine).seconds,
            setup=setup,
            machine=machine,
        )


def recomputation() -> Iterator[Row]:
    machine = read_machine("a100-80gb")
    for row in read("megatron_recompute_table5"):
        micro_batch = int(row["micro_batch"])
        setup = TrainingSetup(
            model=gpt(int(row["num_layers"]), int(row["hidden_size"]), int(row["num_heads"]), int(row["vocab_size"])),
            sequence_length=int(row["seq_length"]),
            num_microbatches=int(row["global_batch"]) // int(row["dp"]) // micro_batch,
            micro_batch_size=micro_batch,
            tensor_parallel=int(row["tp"]),
            data_parallel=int(row["dp"]),
            placement=Placement(int(row["pp"]), int(row["virtual_stages"])),
            recompute=row["recompute"],
            sequence_parallel=row["sequence_parallel"] == "1",
            tied_embeddings=True,
            software=_LATER,
        )
        yield Row(
            "Megatron recomputation table 5",
            f"{row['model']}, {row['recompute']}",
            "s",
            float(row["iteration_s"]),
            predict(setup, machine).seconds,
            setup=setup,
            machine=machine,
        )
