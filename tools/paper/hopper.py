"""Runs of others on Hopper, by Megatron's schedules: Kwai's on H800 (USENIX ATC '24), NVIDIA's on H100, mostly in FP8.

Kwai's recomputation of its own, norms and activation functions, counts as that of norms, and its share of every unit
that moves to the host as that share of the units. In FP8 the products of linear layers are faster and have casts before
them, and all else is as in 16 bit. The projection to the vocabulary counts as a product in FP8, though Megatron has it
in 16 bit; counted so, the rows of dense models would be predicted 4 % slower. Of NVIDIA's long sequences the batch is
not published: eight micro-batches stand for it, on one pipeline stage.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from msgspec import structs

from megatron.seq1f1b.arguments.layer_layout import stages_of_layout
from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.blocks import model_flops
from megatron.seq1f1b.costs.machine import GIB, Machine, read_machine
from megatron.seq1f1b.costs.model_shape import Experts, LatentAttention, Mamba, ModelShape
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.training_setup import Fsdp, TrainingSetup
from megatron.seq1f1b.schedule import Placement

from .row import REFERENCE, Line, Row, fits, known, measured, read, scaled
from .shapes import LLAMA_7B

WITHOUT_OFFLOAD = "Kwai without offload"
WITH_OFFLOAD = "Kwai with offload"
SUMMARY = "NVIDIA performance summary"
MIXTURES = "NVIDIA performance summary, mixtures of experts"
OTHER_MIXTURES = "Other mixtures of experts"
LONG = "NVIDIA long sequences"
# Less of the activations than this moves to the host in runs that count as without offload.
_HARDLY = 0.05
MEMORY = "Kwai with offload, memory"
META = "Llama 3 405B"
# More launches for each expert in 8 bits, which casts its inputs: fitted on one row, qwen3-30b-a3b in release 26.02.
_CASTING = 1.64
# FLOP/s of products in 8 bits with a scale for each tensor: cuBLASLt, matrices of 8192 (Azure/AI-benchmarking-guide,
# ND_H100_v5_results.md). With a scale for each block, 1x128 of activations and 128x128 of weights, they are 1.75 times
# as fast as those of 16 bit for large matrices (NVIDIA, "Boosting Matrix Multiplication Speed and Flexibility with
# NVIDIA cuBLAS 12.9").
_BY_TENSORS = 1290e12
_BY_BLOCKS = 1.75
# Bytes of a cast: a number in 16 bit is read, and written in 8 bit by rows and by columns; a scale for each tensor
# needs another read.
_CAST_BY_TENSORS = 6
_CAST_BY_BLOCKS = 4
# Megatron pads the tokens of each expert to sizes that products in 8 bits need: what an expert receives is copied, and
# what it returns (TEGroupedMLP.quantization_padding); HybridEP and --moe-router-padding-for-quantization spare that.
_PADDING = 8
PRECISIONS = {"bf16": "bf16", "fp8": "fp8", "fp8-cs": "fp8", "fp8-sc": "fp8 by blocks"}
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


# NVIDIA's recipe of Nemotron 3 Nano, 30B-A3B.
_NEMOTRON_3_NANO = ModelShape(
    num_layers=52,
    hidden_size=2688,
    ffn_hidden_size=1856,
    num_heads=32,
    head_dim=128,
    vocab_size=131072,
    num_kv_heads=2,
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    experts=Experts(total=128, active=6, ffn_hidden_size=1856, shared_ffn_hidden_size=3712),
    mamba=Mamba(heads=64, head_dim=64, groups=8, state_dim=128),
)
# config.json of Qwen/Qwen3-8B.
_QWEN3_8B = ModelShape(
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12288,
    num_heads=32,
    head_dim=128,
    vocab_size=151936,
    num_kv_heads=8,
    is_gated=True,
    has_qk_norms=True,
)
_OF_SUMMARY = {
    "llama3-70b": preset("llama3-70b"),
    "llama3.1-405b": preset("llama3-405b"),
    "gpt-oss-120b": preset("gpt-oss-120b"),
    "qwen3-30b-a3b": preset("qwen3-30b-a3b"),
    "qwen3-235b-a22b": preset("qwen3-235b-a22b"),
    "deepseek-v3": preset("deepseek-v3"),
    "nemotron-3-nano": _NEMOTRON_3_NANO,
    "qwen3-8b": _QWEN3_8B,
}
# config.json of moonshotai/Moonlight-16B-A3B.
_OTHER_MIXTURES = {name: preset(name) for name in ("deepseek-v3", "mixtral-8x22b", "qwen3-30b-a3b")}
_OTHER_MIXTURES |= {name: preset(name) for name in ("qwen3-235b-a22b", "qwen3-next-80b")}
# Its run has the prediction head of the model, which `plan` leaves out.
_OTHER_MIXTURES["qwen3-next-80b"] = replace(_OTHER_MIXTURES["qwen3-next-80b"], prediction_depth=1)
_OTHER_MIXTURES["moonlight-16b-a3b"] = ModelShape(
    num_layers=27,
    hidden_size=2048,
    ffn_hidden_size=11264,
    num_heads=16,
    head_dim=128,
    vocab_size=163840,
    is_gated=True,
    latent=LatentAttention(query_rank=0, kv_rank=512, head_dim=128, rotary_head_dim=64, value_head_dim=128),
    experts=Experts(total=64, active=6, ffn_hidden_size=1408, shared_ffn_hidden_size=2816),
    expert_layers=tuple(range(1, 27)),
)
_OTHER_MIXTURES["nemotron-3-nano"] = _NEMOTRON_3_NANO


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


def fp8(machine: Machine, by_blocks: bool = False, pads: bool = False) -> Machine:
    """With faster products of linear layers and casts before them. `pads`: the tokens of experts are copied into padded
    tensors."""
    device = machine.device
    by_tensors = _BY_TENSORS / device.peak_flops
    return replace(
        machine,
        device=structs.replace(
            device,
            matmul_efficiency=_BY_BLOCKS * device.matmul_efficiency if by_blocks else by_tensors,
            cast_bytes=_CAST_BY_BLOCKS if by_blocks else _CAST_BY_TENSORS,
            padding_bytes=_PADDING if pads else 0,
        ),
        host=structs.replace(machine.host, expert=_CASTING * machine.host.expert),
    )


def on(row: Row, machine: Machine) -> Machine:
    """The machine of a row of dense models, made of that of H100."""
    return h800(machine) if row.table in (WITHOUT_OFFLOAD, WITH_OFFLOAD) else fp8(machine)


def _of_precision(row: Line) -> Machine:
    """The machine of a row that has the columns of a recipe."""
    machine = read_machine("h100-80gb")
    if known(PRECISIONS, row["precision"]) == "bf16":
        return machine
    return fp8(machine, by_blocks=row["precision"] == "fp8-sc", pads=row.is_set("pads_tokens"))


def predicted(table: str, label: str, tokens_per_second: float | None, setup: TrainingSetup, machine: Machine) -> Row:
    """A row of throughput, with its prediction."""
    return Row(
        table=table,
        label=label,
        unit="tokens/s",
        published=tokens_per_second,
        predicted=predict(setup, machine).tokens_per_second,
        setup=setup,
        machine=machine,
    )


class RecipeSetup(TrainingSetup):
    """Of a performance recipe of Megatron-Bridge: all of them sum gradients in 16 bit (grad_reduce_in_fp32)."""

    gradient_bytes: ClassVar[int] = 2


def _setup(
    model: ModelShape,
    length: int,
    batch: int,
    devices: int,
    *sizes: int,
    program: type[TrainingSetup] = TrainingSetup,
    **choices: Any,
) -> TrainingSetup:
    """`sizes` are those of tensor, context and pipeline parallelism. Raises ValueError unless they divide the devices,
    and the replicas that result the batch."""
    tensor, context, stages = sizes
    micro_batch = choices.get("micro_batch_size", 1)
    data, left_over = divmod(devices, tensor * context * stages)
    if left_over or not data:
        raise ValueError(f"{devices} GPUs are no multiple of TP {tensor} x CP {context} x PP {stages}")
    if batch % (data * micro_batch):
        raise ValueError(f"a batch of {batch} is no multiple of {data} replicas x micro-batches of {micro_batch}")
    return program(
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


def of_recipe(model: ModelShape, row: Line, **choices: Any) -> TrainingSetup:
    """The set-up of a row that has the columns of a recipe."""
    stages = int(row["pp"])
    return _setup(
        model,
        int(row["seq_length"]),
        int(row["gbs"]),
        int(row["gpus"]),
        *(int(row["tp"]), int(row["cp"]), stages),
        micro_batch_size=int(row["mbs"]),
        placement=Placement(stages, int(row["vp"])),
        layers_per_stage=_layers(row["layout"]),
        expert_parallel=int(row["ep"]),
        overlaps_data_parallel=row.is_set("overlaps_gradients"),
        fuses_loss=row.is_set("fused_loss"),
        recompute=row["recompute"],
        dispatches_once=row["dispatcher"] != "alltoall",
        hides_experts=row.is_set("hides_experts"),
        **choices,
    )


def kwai(folder: Path = REFERENCE) -> Iterator[Row]:
    for row in read("kwai_offload_h800", folder):
        model = known(_KWAI, row["model"])
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
        published = measured(row["tokens_per_second_all_gpus"])
        machine = h800(read_machine("h100-80gb"))
        yield predicted(table, f"{row['model']}, {devices} GPUs", published, setup, machine)


def _layers(layout: str) -> tuple[int, ...]:
    """The layers of each stage; () stands for an even spread."""
    return tuple(stage.count("t") for stage in stages_of_layout(layout)) if layout else ()


def memory_of_kwai(folder: Path = REFERENCE) -> Iterator[Row]:
    """What a rank of Llama-65B allocates, by the share of its activations on the host. The parallel sizes are those of
    the script that the table names."""
    model = _KWAI["Llama-65B"]
    for row in read("kwai_offload_memory_65b", folder):
        setup = _setup(
            known(_KWAI, row["model"]),
            8192,
            256,
            int(row["gpus"]),
            *(2, 2, 8),
            placement=Placement(8, model.num_layers // 8 // 2),
            offloads=float(row["alpha"]),
        )
        for column, recompute in (("no_ckpt", "none"), ("balanced_ckpt", "layernorm")):
            published = scaled(measured(row[f"max_memory_allocated_{column}_bytes"]), 1 / GIB)
            recomputing = replace(setup, recompute=recompute)
            prediction = predict(recomputing, h800(read_machine("h100-80gb")))
            allocated = max(memory.total - memory.reserved for memory in prediction.memory)
            words = "nothing" if recompute == "none" else "norms and activation functions"
            yield Row(
                table=MEMORY,
                label=f"{row['model']}, {row['alpha']} on the host, {words} computed again",
                unit="GiB",
                published=published,
                predicted=allocated / GIB if fits(prediction) else None,
                setup=recomputing,
                machine=prediction.machine,
            )


def of_tflops(setup: TrainingSetup, tflops_per_gpu: float | None) -> float | None:
    """The tokens/s of a run whose source has the FLOPs of its model alone."""
    length = setup.sequence_length
    return scaled(tflops_per_gpu, 1e12 * setup.num_devices / (model_flops(setup.model, length, 1) / length))


def summary(folder: Path = REFERENCE) -> Iterator[Row]:
    """Recomputation, and whether experts exchange beside another micro-batch, are those of NVIDIA's recipes."""
    for row in read("h100_megatron_bridge", folder):
        model = known(_OF_SUMMARY, row["model"])
        devices = int(row["gpus"])
        program = RecipeSetup if "performance-summary" in row["source"] else TrainingSetup
        setup = of_recipe(model, row, program=program)
        published = scaled(measured(row["tokens_per_second_per_gpu"]), devices)
        if published is None:
            published = of_tflops(setup, measured(row["model_tflops_per_gpu"]))
        release = row["source"].split()[-1]
        precision = known(PRECISIONS, row["precision"])
        label = f"{row['model']}, {devices} GPUs, {precision}, batch {row['gbs']}, {release}"
        table = SUMMARY if model.experts is None else MIXTURES
        yield predicted(table, label, published, setup, _of_precision(row))


def other_mixtures(folder: Path = REFERENCE) -> Iterator[Row]:
    """What its source calls norms and activation functions are the modules `layernorm moe_act`."""
    for row in read("mixtures_h100", folder):
        model = known(_OTHER_MIXTURES, row["model"])
        length = int(row["seq_length"])
        devices = int(row["gpus"])
        batch = int(row["gbs"])
        setup = of_recipe(
            model,
            row,
            fsdp=Fsdp.PARAMETERS if row.is_set("fsdp") else Fsdp.OFF,
            hides_tensor_exchange=row.is_set("tp_comm_overlap"),
        )
        published = of_tflops(setup, measured(row["tflops_per_gpu"]))
        seconds = measured(row["step_seconds"])
        if seconds is not None:
            published = length * batch / seconds
        words = [
            row["model"],
            f"{length // 1024}K",
            f"{devices} GPUs",
            known(PRECISIONS, row["precision"]),
            f"TP {row['tp']}, CP {row['cp']}, PP {row['pp']}, EP {row['ep']}",
            f"{row['dispatcher']} hidden" if setup.hides_experts else row["dispatcher"],
            row["note"],
        ]
        label = ", ".join(word for word in words if word)
        yield predicted(OTHER_MIXTURES, label, published, setup, _of_precision(row))


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
        published = scaled(measured(row["tflops_per_gpu"]), 1e12 * devices / flops)
        label = f"{row['model']}, {length // 1024}K, {devices} GPUs, fp8"
        yield predicted(LONG, label, published, setup, fp8(read_machine("h100-80gb")))


def meta(folder: Path = REFERENCE) -> Iterator[Row]:
    """Pre-training of Llama 3 405B. Its first chunk has only the embedding and its last one only the loss (section
    3.3.2), so the others have one layer of 126 each. FLOPs count attention as causal."""
    model = preset("llama3-405b")
    for row in read("llama3_405b", folder):
        length = int(row["seq_length"])
        devices = int(row["gpus"])
        stages = int(row["pp"])
        setup = _setup(
            model,
            length,
            int(row["batch_per_dp"]) * int(row["dp"]),
            devices,
            *(int(row["tp"]), int(row["cp"]), stages),
            placement=Placement(stages, int(row["chunks_inferred"])),
            layers_per_stage=(0, *(1,) * model.num_layers, 0),
            overlaps_data_parallel=True,
        )
        if setup.context_parallel > 1:
            setup = replace(setup, cp_comm_type="all_gather")
        flops = model_flops(model, length, 1) / length
        published = scaled(measured(row["tflops_per_gpu"]), 1e12 * devices / flops)
        label = f"{devices} GPUs, {length // 1024}K, bf16"
        yield predicted(META, label, published, setup, read_machine("h100-80gb"))
