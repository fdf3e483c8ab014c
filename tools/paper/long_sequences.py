"""Long sequences: SlimPipe's memory model (arXiv 2504.14519).

Its slices are segments. What it spreads over the pipeline, the projection to the vocabulary, is left out.
"""

from collections.abc import Iterator
from pathlib import Path

from megatron.seq1f1b.costs.machine import GIB, OUTSIDE_GIB, read_machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.costs.step_memory import rank_memory
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planner.search import fits
from megatron.seq1f1b.schedule import Placement, build

from .row import REFERENCE, Row, read

_LLAMA_7B = ModelShape(32, 4096, 11008, 32, 128, 32000, is_gated=True)
# It counts a vocabulary of 128,000.
_SLIMPIPE = {
    "LLaMA-13B": ModelShape(40, 5120, 13824, 40, 128, 128000, is_gated=True),
    "LLaMA-70B-GQA": ModelShape(80, 8192, 28672, 64, 128, 128000, 8, is_gated=True),
}


def memory_model(folder: Path = REFERENCE) -> Iterator[Row]:
    """The first rank, all but the output, against the authors' model, which is an estimate, too."""
    for row in read("slimpipe_memory_model", folder):
        length, slices, data = int(row["s"]), int(row["n"]), int(row["d"])
        setup = TrainingSetup(
            _SLIMPIPE[row["Model"]],
            length,
            int(row["B"]) // data,
            tensor_parallel=int(row["t"]),
            context_parallel=int(row["c"]),
            data_parallel=data,
            placement=Placement(int(row["p"]), int(row["v"])),
            segments=(length // slices,) * slices,
            sequence_parallel=True,
            recompute="none" if row["recompute"] == "no" else row["recompute"],
            distributed_optimizer=True,
        )
        memory = rank_memory(setup, build("1f1b", setup.shape).ranks[0], 0)
        published = float(row["Peak Memory (GiB)"]) - float(row["Output Memory (GiB)"])
        parallel = f"TP {row['t']}, CP {row['c']}, PP {row['p']}, {slices} slices, {row['v']} chunks"
        label = f"{row['Model']}, {length // 1024}K, {parallel}"
        yield Row("SlimPipe memory model", label, "GiB", published, (memory.total - memory.reserved) / GIB, setup=setup)


def longest_sequence(folder: Path = REFERENCE) -> Iterator[Row]:
    """The longest sequence that Megatron's 1F1B holds, in steps of 1,024 tokens."""
    room = (read_machine("h100-80gb").device.memory_gib - OUTSIDE_GIB) * GIB
    for row in read("slimpipe_max_seqlen_7b", folder):
        stages = int(row["pp"])

        def setup_of(thousands: int, stages: int = stages, tensor: int = int(row["tp"])) -> TrainingSetup:
            return TrainingSetup(
                _LLAMA_7B,
                1024 * thousands,
                2 * stages,
                tensor_parallel=tensor,
                placement=Placement(stages),
                sequence_parallel=True,
                distributed_optimizer=True,
                keeps_logits=True,
            )

        longest = 1
        while fits(setup_of(longest + 1), room):
            longest += 1
        label = f"{row['model']}, {row['system']}"
        published = float(row["longest_sequence"].removesuffix("K"))
        yield Row("SlimPipe, longest sequences", label, "K tokens", published, longest, setup=setup_of(longest))
