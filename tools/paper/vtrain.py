"""Runs of Megatron measured for vTrain (arXiv 2312.12391) on 1 to 64 nodes of eight A100."""

from collections.abc import Iterator
from pathlib import Path

from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.schedule import Placement

from .programs import PaperSetup
from .row import REFERENCE, Row, check_devices, gpt, measured, read, scaled

_PROGRAM = dict(flash_attention=False, overlaps_messages=False, gradient_bytes=2, dropout=True)
_VOCABULARY = 51200  # of Megatron's GPT-2 tokenizer, padded


def _rows(folder: Path, name: str, table: str, recompute: str) -> Iterator[Row]:
    machine = read_machine("a100-vtrain")
    for row in read(name, folder):
        sizes = {key: int(value) for key, value in row.items() if key not in ("parameters_billion", "iteration_ms")}
        setup = PaperSetup(
            model=gpt(sizes["num_layers"], sizes["hidden_size"], sizes["num_heads"], _VOCABULARY),
            sequence_length=sizes["seq_length"],
            num_microbatches=row.quotient("global_batch", "dp", "micro_batch"),
            micro_batch_size=sizes["micro_batch"],
            tensor_parallel=sizes["tp"],
            data_parallel=sizes["dp"],
            placement=Placement(sizes["pp"]),
            recompute=recompute,
            tied_embeddings=True,
            **_PROGRAM,
        )
        check_devices(row, "gpus", setup)
        label = (
            f"{sizes['num_layers']} x {sizes['hidden_size']}, batch {sizes['global_batch']}, micro-batch "
            f"{sizes['micro_batch']}, TP {sizes['tp']} DP {sizes['dp']} PP {sizes['pp']}"
        )
        seconds = scaled(measured(row["iteration_ms"]), 1e-3)
        yield Row(
            table=table,
            label=label,
            unit="s",
            published=seconds,
            predicted=predict(setup, machine).seconds,
            setup=setup,
            machine=machine,
        )


def multi_node(folder: Path = REFERENCE) -> Iterator[Row]:
    return _rows(folder, "vtrain_a100_multi_node", "vTrain multi-node", "full")


def single_node(folder: Path = REFERENCE) -> Iterator[Row]:
    """The source does not mention recomputation here; times fit without any."""
    return _rows(folder, "vtrain_a100_single_node", "vTrain single node", "none")
