"""The micro-batches of a case: random tokens, with masked losses and packed documents."""

from itertools import pairwise

import torch

from functional_tests.equality.cases import Case
from functional_tests.equality.models import SEQUENCE, VOCABULARY

BATCH, END = 2, 6


def batches(case: Case, first: int, step: int):
    """Micro-batches `first`, `first + step`, … of random tokens; `mask` zeroes some, or all of one segment."""
    for microbatch in range(first, case.m * step, step):
        generator = torch.Generator().manual_seed(100 + microbatch)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        loss_mask = torch.ones(BATCH, SEQUENCE)
        if case.mask == "random":
            loss_mask = (torch.rand(BATCH, SEQUENCE, generator=generator) < 0.3 + 0.2 * microbatch).float()
        elif case.mask == "segment":
            start = sum(case.lengths[: microbatch % case.k])
            loss_mask[:, start : start + case.lengths[microbatch % case.k]] = 0 if case.k > 1 else 1
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": loss_mask.double(),  # since Megatron divides sums of it
            "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1),
        }
        if case.packed == "apart":
            yield from apart(batch | packed(tokens[:, :-1], "tokens"), microbatch)
        else:
            yield batch | packed(tokens[:, :-1], case.packed) if case.packed else batch


def apart(batch: dict, microbatch: int):
    """Each document of a batch as a batch of its own, with the number of the micro-batch that it is from."""
    starts = batch["position_ids"] == 0
    for row, found in enumerate(starts):
        bounds = [*found.nonzero().flatten().tolist(), SEQUENCE]
        for start, end in pairwise(bounds):
            yield {name: entry[row : row + 1, start:end] for name, entry in batch.items()} | {"part_of": microbatch}


def packed(tokens: torch.Tensor, form: str) -> dict:
    """Entries of a batch with several documents, each ended by a token below END: positions within them, and a mask or
    cumulative lengths; for "rolls" a mask, and cumulative lengths for multi-token prediction alone."""
    tokens = torch.where(tokens < END, 0, tokens)
    starts = torch.nn.functional.pad(tokens[:, :-1] == 0, (1, 0), value=True)
    documents = starts.cumsum(dim=1)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    entries = {"tokens": tokens, "position_ids": positions - torch.where(starts, positions, 0).cummax(dim=1).values}
    if form in ("mask", "rolls"):
        sees = (documents[:, :, None] == documents[:, None, :]).tril()
        entries["attention_mask"] = ~sees[:, None]
    bounds = torch.where(starts, positions, SEQUENCE).sort(dim=1).values
    bounds = torch.nn.functional.pad(bounds, (0, 1), value=SEQUENCE).int()
    if form == "rolls":
        entries["rolled_within"] = bounds
    elif form == "cu_seqlens":
        entries |= {"cu_seqlens": bounds, "max_seqlen": bounds.diff(dim=1).max(dim=1).values}
    return entries
