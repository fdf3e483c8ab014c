"""A question so small that all of its configurations can be simulated."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from msgspec import structs

from megatron.seq1f1b.costs.machine import read_machine
from megatron.seq1f1b.costs.model_shape import ModelShape
from megatron.seq1f1b.planner.space import Candidate, Question, cuts, families, numbers_of_segments, setups

MODEL = ModelShape(6, 1024, 4096, 8, 128, 32768)
WORDS = (
    "--num-layers 6 --hidden-size 1024 --num-attention-heads 8 --vocab-size 32768 --ffn-hidden-size 4096 "
    "--kv-channels 128"
)


def candidates(question: Question) -> Iterator[Candidate]:
    """All candidates, whether they fit or not."""
    for setup in setups(question):
        for family, segments in product(families(question, setup), numbers_of_segments(question, setup)):
            yield from cuts(replace(setup, family=family), segments)


@cache
def small(**changes) -> Question:
    choices = {"families": ("1f1b", "zb-h1"), "segments": (1, 2, 4), "chunks": (1, 2), "micro_batches": (1, 2)}
    sizes = {"num_devices": 4, "sequence_length": 8192, "global_batch_size": 4, "memory_gib": 16}
    return Question(**{"model": MODEL, "machine": read_machine("a100-80gb"), **sizes, **choices, **changes})


def linked(bandwidth, **changes):
    """The small question, with a link to the host of so many bytes/s."""
    machine = small().machine
    return small(machine=replace(machine, device=structs.replace(machine.device, host_bandwidth=bandwidth)), **changes)
