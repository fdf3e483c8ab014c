#!/usr/bin/env python3
"""What fills the fullest rank of a launch, by use and length of the sequences: the table of docs/long-context.md.

    python tools/memory_by_use.py

llama3-70b on 128 H100 with tensor parallelism 8 and pipeline parallelism 16, in steps of four sequences. Predicted with
the costs of `seq1f1b plan`.
"""

from collections.abc import Iterator

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.costs.machine import GIB, read_machine
from megatron.seq1f1b.costs.simulator import predict
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.partition import even
from megatron.seq1f1b.schedule import Placement

LENGTHS = {32768: 16, 131072: 16, 1048576: 64}  # tokens -> segments
FULL = "full"
ALL_BUT_ATTENTION = "all but attention"
# Name -> chunks, whether sequences are cut, recomputation, whether all logits are kept.
METHODS = {
    "1F1B": (1, False, "none", True),
    "1F1B, full recomputation": (1, False, FULL, True),
    "Seq1F1B-I, logits kept": (5, True, "none", True),
    "Seq1F1B-I": (5, True, "none", False),
    "Seq1F1B-I, all but attention recomputed": (5, True, ALL_BUT_ATTENTION, False),
}
HEAD = ("tokens", "method", "GiB", "state", "activations", "keys and values", "loss", "rest")


def rows() -> Iterator[list[str]]:
    model = preset("llama3-70b")
    machine = read_machine("h100-80gb")
    for length, segments in LENGTHS.items():
        for name, (chunks, is_cut, recompute, keeps_logits) in METHODS.items():
            setup = TrainingSetup(
                model,
                length,
                num_microbatches=4,
                tensor_parallel=8,
                placement=Placement(16, chunks),
                segments=tuple(even(length, segments)) if is_cut else (),
                sequence_parallel=True,
                recompute=recompute,
                distributed_optimizer=True,
                keeps_logits=keeps_logits,
            )
            most = max(predict(setup, machine).memory, key=lambda memory: memory.total)
            state = most.weights + most.gradients + most.optimizer
            uses = [state, most.activations, most.keys_values, most.logits]
            sizes = [most.total, *uses, most.total - sum(uses)]
            yield [f"{length >> 10} Ki", name, *(f"{size / GIB:.1f}" for size in sizes)]


def main() -> None:
    for row in (HEAD, ["---"] * len(HEAD), *rows()):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
