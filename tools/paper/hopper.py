"""Runs of others on Hopper, by Megatron's schedules: Kwai's on H800 (USENIX ATC '24), NVIDIA's on H100, mostly in FP8.

Kwai's recomputation of its own, norms and activation functions, counts as that of norms, and its share of every unit
that moves to the host as that share of the units. In FP8 the products of linear layers have twice the peak, and all
else is as in 16 bit. Of NVIDIA's long sequences the batch is not published: eight micro-batches stand for it, on one
pipeline stage.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.blocks import model_flops
from megatron.seq1f1b.costs.machine import Machine, read_machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.schedule import Placement

from .row import REFERENCE, Row, read
from .shapes import LLAMA_7B

WITHOUT_OFFLOAD = "Kwai without offload"
WITH_OFFLOAD = "Kwai with offload"
SUMMARY = "NVIDIA performance summary"
LONG = "NVIDIA long sequences"
# Less of the activations than this moves to the host in runs that count as without offload.
_HARDLY = 0.05
_KWAI = {
    "Llama-65B": ModelShape(
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=22016,
        num_heads=64,
        head_dim=128,
        vocab_size=32000,
        is_gated=True,
    ),
    "Llama2-70B": ModelShape(
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_heads=64,
        head_dim=128,
        vocab_size=32000,
        num_kv_heads=8,
        is_gated=True,
    ),
    "Llama-175B": ModelShape(
        num_layers=96,
        hidden_size=12288,
        ffn_hidden_size=32768,
        num_heads=96,
        head_dim=128,
        vocab_size=32000,
        is_gated=True,
    ),
}


def h800(machine: Machine) -> Machine:
    """An H100 with the links that the table names: NVLink of 400 GB/s for 900, eight adapters of 100 Gbit/s a node."""
    slower = 400 / 900
    adapter = 100e9 / 8
    return replace(
        machine,
        name="h800-80gb",
        node=structs.replace(machine.node, bandwidth=slower * machine.node.bandwidth),
        # Of the data sheet, collectives and messages reach as much as on the adapters of the H100 file.
        network=structs.replace(
            machine.network,
            bandwidth=machine.network.bandwidth * 8 * adapter / 400e9,
            message_bandwidth=machine.network.message_bandwidth * 8 * adapter / 400e9,
        ),
    )


def fp8(machine: Machine) -> Machine:
    """With twice the peak in products of linear layers."""
    device = machine.device
    return replace(machine, device=structs.replace(device, matmul_efficiency=2 * device.matmul_efficiency))


def on(row: Row, machine: Machine) -> Machine:
    """The machine of a row, made of that of H100."""
    if row.table in (WITHOUT_OFFLOAD, WITH_OFFLOAD):
        return h800(machine)
    return machine if "bf16" in row.label else fp8(machine)


def _predicted(table: str, label: str, tokens_per_second: float, setup: TrainingSetup) -> Row:
    row = Row(
        table=table,
        label=label,
        unit="tokens/s",
        published=tokens_per_second,
        setup=setup,
    )
    machine = on(row, read_machine("h100-80gb"))
    return replace(row, machine=machine, predicted=predict(setup, machine).tokens_per_second)


def _setup(model: ModelShape, length: int, batch: int, devices: int, *sizes: int, **choices: Any) -> TrainingSetup:
    """`sizes` are those of tensor, context and pipeline parallelism."""
    tensor, context, stages = sizes
    micro_batch = choices.get("micro_batch_size", 1)
    data = devices // (tensor * context * stages)
    return TrainingSetup(
        model,
        length,
        batch // data // micro_batch,
        tensor_parallel=tensor,
        context_parallel=context,
        data_parallel=data,
        sequence_parallel=tensor > 1,
        distributed_optimizer=True,
        keeps_logits=True,
        cp_comm_type="p2p" if context > 1 else None,
        **choices,
    )


def kwai(folder: Path = REFERENCE) -> Iterator[Row]:
    for row in read("kwai_offload_h800", folder):
        model = _KWAI[row["model"]]
        devices = int(row["gpus"])
        stages = int(row["p"])
        chunks = model.num_layers // stages // int(row["layers_per_virtual_stage"])
        setup = _setup(
            model,
            int(row["seq_length"]),
            int(row["global_batch"]),
            devices,
            *(int(row["t"]), int(row["c"]), stages),
            placement=Placement(stages, chunks),
            recompute="none" if row["ckpt"] == "no" else "layernorm",
            offloads=float(row["offload_alpha"]),
        )
        table = WITHOUT_OFFLOAD if float(row["offload_alpha"]) < _HARDLY else WITH_OFFLOAD
        yield _predicted(table, f"{row['model']}, {devices} GPUs", float(row["tokens_per_second_all_gpus"]), setup)


def summary(folder: Path = REFERENCE) -> Iterator[Row]:
    for row in read("h100_megatron_bridge", folder):
        name = row["model"].replace("3.1", "3")
        devices = int(row["gpus"])
        stages = int(row["pp"])
        setup = _setup(
            preset(name),
            int(row["seq_length"]),
            int(row["gbs"]),
            devices,
            *(int(row["tp"]), int(row["cp"]), stages),
            micro_batch_size=int(row["mbs"]),
            placement=Placement(stages, int(row["vp"])),
            expert_parallel=int(row["ep"]),
            overlaps_data_parallel=True,
        )
        published = devices * float(row["tokens_per_second_per_gpu"])
        yield _predicted(SUMMARY, f"{name}, {devices} GPUs, {row['precision'].split('-')[0]}", published, setup)


def long(folder: Path = REFERENCE) -> Iterator[Row]:
    for row in read("nemo_long_sequences_h100", folder):
        length = 1024 * int(row["seq_length_k"])
        devices = int(row["gpus"])
        stages = int(row["pp"])
        setup = _setup(
            LLAMA_7B,
            length,
            8 * int(row["dp"]),
            devices,
            int(row["tp"]),
            int(row["cp"]),
            stages,
            placement=Placement(stages),
            overlaps_data_parallel=True,
        )
        flops = model_flops(LLAMA_7B, length, 1) / length
        published = 1e12 * devices * float(row["tflops_per_gpu"]) / flops
        yield _predicted(LONG, f"{row['model']}, {length // 1024}K, {devices} GPUs, fp8", published, setup)
