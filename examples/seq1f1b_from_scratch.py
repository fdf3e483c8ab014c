#!/usr/bin/env python3
"""Seq1F1B from nothing: two processes train a toy transformer on sequences that are cut into segments.

    python examples/seq1f1b_from_scratch.py

Each process is a stage of a pipeline. In 1F1B whole micro-batches pass through the stages; in Seq1F1B (arXiv
2406.03488) their segments do: k times as many units, each with 1/k of the tokens. So stages idle less and hold less.
A causal model allows this, since a token depends on earlier tokens only. Three things are new:

1. Attention reads the keys and values of earlier segments from a cache.
2. Segments go forward in order and backward in reverse: a key receives gradients from all later segments.
3. A stage runs k - 1 more forwards before it alternates between forwards and backwards.

Nothing is approximated: in the end, all gradients equal those of whole sequences.
"""

import tempfile
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn

STAGES, MICROBATCHES, SEGMENTS = 2, 2, 4
BATCH, LENGTH, HIDDEN, HEADS, LAYERS, VOCABULARY = 2, 32, 16, 4, 2, 50  # LAYERS of each stage
TOKENS = LENGTH // SEGMENTS  # of each segment


# ------------------------------------------------------------------------------------------------------------ the model


class KeysValues(NamedTuple):
    """The keys and values of one segment in one layer. Later segments read a detached copy, so the graph of a segment
    ends at its own tokens, and `read.grad` collects what the backwards of later segments have for this one."""

    made: Tensor
    read: Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key_value = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, cache: list[KeysValues]) -> Tensor:
        """`x` is [batch, tokens of a segment, hidden]; `cache` has the earlier segments, and gets this one."""
        made = self.key_value(x)
        keys_values = torch.cat([*(earlier.read for earlier in cache), made], dim=1)
        cache.append(KeysValues(made, made.detach().requires_grad_()))

        key, value = keys_values.chunk(2, dim=-1)
        query, key, value = (
            of_all.unflatten(-1, (HEADS, -1)).transpose(1, 2) for of_all in (self.query(x), key, value)
        )
        # The last query sees all keys, the one before it all but one, and so on.
        queries, keys = query.shape[2], key.shape[2]
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)

        x = x + attended.transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class Stage(nn.Module):
    """The layers of one rank. The first stage begins with an embedding, the last one ends with logits."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.is_first = rank == 0
        self.is_last = rank == STAGES - 1
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        if self.is_first:
            self.words = nn.Embedding(VOCABULARY, HIDDEN)
            self.positions = nn.Embedding(LENGTH, HIDDEN)
        if self.is_last:
            self.logits = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x: Tensor, start: int, caches: list[list[KeysValues]]) -> Tensor:
        """`x` is tokens or what the stage before sent, from position `start` on; `caches` has one for each layer."""
        if self.is_first:
            x = self.words(x) + self.positions(torch.arange(start, start + x.shape[1]))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.logits(x) if self.is_last else x


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """A part of the mean over all tokens of the step: the losses of segments add up to the loss of the step."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (MICROBATCHES * BATCH * LENGTH)


# ------------------------------------------------------------------------------------------------------------ the order


class Action(NamedTuple):
    kind: str  # "F" or "B": the forward or the backward of a segment
    microbatch: int
    segment: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.segment}"


def order(rank: int) -> list[Action]:
    """The actions of a rank, in the order of their ticks on a clock that all ranks share.

    A segment starts every second tick, and reaches the next stage one tick later. The ticks between are for backwards,
    which mirror the forwards: micro-batch by micro-batch, segments in reverse, from the last stage to the first. They
    begin right after the first micro-batch has gone forward on the last stage. With one segment, this is 1F1B.
    """
    turn = 2 * (SEGMENTS - 1) + (STAGES - 1) + 1
    ticks = {}
    for number, (microbatch, segment) in enumerate(product(range(MICROBATCHES), range(SEGMENTS))):
        ticks[Action("F", microbatch, segment)] = 2 * number + rank
    for number, (microbatch, segment) in enumerate(product(range(MICROBATCHES), reversed(range(SEGMENTS)))):
        ticks[Action("B", microbatch, segment)] = turn + 2 * number + (STAGES - 1 - rank)
    return sorted(ticks, key=ticks.get)


# ------------------------------------------------------------------------------------------------------------- the loop


def receive(source: int) -> Tensor:
    """The next message from a rank. Both ends follow the same clock, so messages need no names."""
    message = torch.empty(BATCH, TOKENS, HIDDEN)
    dist.recv(message, source)
    return message


def run(rank: int, stage: Stage, tokens: Tensor, labels: Tensor) -> tuple[float, int]:
    """Run one step, and leave gradients in the parameters of `stage`. `tokens` and `labels` are [micro-batch, batch,
    length]. Returns the loss, which the last rank has, and the most segments that this rank held at once."""
    caches = defaultdict(lambda: [[] for _ in range(LAYERS)])  # by micro-batch
    held = {}  # the input and output of each segment, from its forward to its backward
    sends = []
    loss, most_held = 0.0, 0

    for kind, microbatch, segment in order(rank):
        start = segment * TOKENS
        columns = slice(start, start + TOKENS)

        if kind == "F":
            x = tokens[microbatch, :, columns] if stage.is_first else receive(rank - 1).requires_grad_()
            output = stage(x, start, caches[microbatch])
            if stage.is_last:
                output = loss_of(output, labels[microbatch, :, columns])
                loss += output.item()
            else:
                sends.append(dist.isend(output.detach(), rank + 1))
            held[microbatch, segment] = x, output
            most_held = max(most_held, len(held))

        if kind == "B":
            x, output = held.pop((microbatch, segment))
            gradient = None if stage.is_last else receive(rank + 1)
            # Later segments are gone, so each cache ends with this one. It is freed here.
            own = [cache.pop() for cache in caches[microbatch]]
            # The graph of a segment ends in its output, and in keys and values that later segments have read.
            was_read = [entry for entry in own if entry.read.grad is not None]
            ends = [output, *(entry.made for entry in was_read)]
            torch.autograd.backward(ends, [gradient, *(entry.read.grad for entry in was_read)])
            if not stage.is_first:
                sends.append(dist.isend(x.grad, rank - 1))

    for send in sends:
        send.wait()
    return loss, most_held


# ------------------------------------------------------------------------------------------------------------ the proof


def run_whole(stages: list[Stage], tokens: Tensor, labels: Tensor) -> float:
    """The same step with whole sequences and without a pipeline, by autograd alone. Returns the loss."""
    total = 0.0
    for x, goal in zip(tokens, labels, strict=True):
        for stage in stages:
            x = stage(x, 0, [[] for _ in range(LAYERS)])
        loss = loss_of(x, goal)
        loss.backward()
        total += loss.item()
    return total


def main(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=STAGES)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # each rank makes the whole model and all data, and trains its own stage
    stages = [Stage(number) for number in range(STAGES)]
    tokens, labels = torch.randint(VOCABULARY, (2, MICROBATCHES, BATCH, LENGTH))

    expected_loss = run_whole(stages, tokens, labels)
    expected = [parameter.grad for parameter in stages[rank].parameters()]
    stages[rank].zero_grad()
    loss, most_held = run(rank, stages[rank], tokens, labels)

    gradients = [parameter.grad for parameter in stages[rank].parameters()]
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)
    if stages[rank].is_last:
        assert abs(loss - expected_loss) < 1e-10

    actions = " ".join(map(str, order(rank)))
    held_by_1f1b = SEGMENTS * min(STAGES - rank, MICROBATCHES)
    print(
        f"rank {rank}: {actions}\n"
        f"        It held at most {most_held} segments of activations; 1F1B would hold {held_by_1f1b}.\n"
        f"        All {len(gradients)} gradients equal those of whole sequences."
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, args=(Path(folder, "store"),), nprocs=STAGES)
