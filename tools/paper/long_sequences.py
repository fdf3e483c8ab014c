"""Long sequences: SlimPipe's memory model (arXiv 2504.14519).

Its slices are segments. What it spreads over the pipeline, the projection to the vocabulary, is left out.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.machine import GIB, OUTSIDE_GIB, read_machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.step_memory import rank_memory
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planner.fitting import fits
from megatron.seq1f1b.schedule import Placement, build, moved

from .row import REFERENCE, Line, Row, known, measured, read
from .shapes import LLAMA_7B

# It counts a vocabulary of 128,000.
_SLIMPIPE = {
    "LLaMA-13B": ModelShape(
        num_layers=40,
        hidden_size=5120,
        ffn_hidden_size=13824,
        num_heads=40,
        head_dim=128,
        vocab_size=128000,
        is_gated=True,
    ),
    "Mixtral-8x7B": replace(preset("mixtral-8x7b"), vocab_size=128000),
    "Mixtral-8x22B": replace(preset("mixtral-8x22b"), vocab_size=128000),
    "LLaMA-70B-GQA": ModelShape(
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_heads=64,
        head_dim=128,
        vocab_size=128000,
        num_kv_heads=8,
        is_gated=True,
    ),
}


def memory_model(folder: Path = REFERENCE) -> Iterator[Row]:
    """The first rank, all but the output, against the authors' model, which is an estimate, too."""
    for row in read("slimpipe_memory_model", folder):
        yield _first_rank(row, "SlimPipe memory model", "none" if row["recompute"] == "no" else row["recompute"])


def ultra_long(folder: Path = REFERENCE) -> Iterator[Row]:
    """The same for two and three million tokens, with a share of the activations on the host. The authors' partial
    recomputation counts as that of norms and feed-forward blocks."""
    for row in read("slimpipe_ultra_long", folder):
        yield _first_rank(row, "SlimPipe memory model, ultra-long", "layernorm mlp moe")


def _first_rank(row: Line, table: str, recompute: str) -> Row:
    length = int(row["s"])
    slices = int(row["n"])
    data = int(row["d"])
    share = float(row.get("offload ratio", "0"))
    setup = TrainingSetup(
        known(_SLIMPIPE, row["Model"]),
        length,
        int(row["B"]) // data,
        tensor_parallel=int(row["t"]),
        context_parallel=int(row["c"]),
        expert_parallel=int(row["e"]),
        data_parallel=data,
        placement=Placement(int(row["p"]), int(row["v"])),
        segments=(length // slices,) * slices,
        sequence_parallel=True,
        recompute=recompute,
        distributed_optimizer=True,
        offloads=share,
    )
    order = moved(build("1f1b", setup.shape), share).ranks[0]
    memory = rank_memory(setup, order, 0)
    parallel = f"TP {row['t']}, CP {row['c']}, PP {row['p']}, {slices} slices, {row['v']} chunks"
    peak = measured(row["Peak Memory (GiB)"])
    return Row(
        table=table,
        label=f"{row['Model']}, {length // 1024}K, {parallel}",
        unit="GiB",
        published=None if peak is None else peak - float(row["Output Memory (GiB)"]),
        predicted=(memory.total - memory.reserved) / GIB,
        setup=setup,
    )


def longest_sequence(folder: Path = REFERENCE) -> Iterator[Row]:
    """The longest sequence that Megatron's 1F1B holds, in steps of 1,024 tokens."""
    budget = (read_machine("h100-80gb").device.memory_gib - OUTSIDE_GIB) * GIB
    for row in read("slimpipe_max_seqlen_7b", folder):
        stages = int(row["pp"])

        def setup_of(thousands: int, stages: int = stages, tensor: int = int(row["tp"])) -> TrainingSetup:
            return TrainingSetup(
                LLAMA_7B,
                1024 * thousands,
                2 * stages,
                tensor_parallel=tensor,
                placement=Placement(stages),
                sequence_parallel=True,
                distributed_optimizer=True,
                keeps_logits=True,
            )

        longest = 1
        while fits(setup_of(longest + 1), budget):
            longest += 1
        label = f"{row['model']}, {row['system']}"
        published = float(row["longest_sequence"].removesuffix("K"))
        yield Row(
            table="SlimPipe, longest sequences",
            label=label,
            unit="K tokens",
            published=published,
            predicted=longest,
            setup=setup_of(longest),
        )
