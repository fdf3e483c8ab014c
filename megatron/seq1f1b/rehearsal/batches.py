"""Batches without values, in the form of those of Megatron's GPTDataset."""

from argparse import Namespace
from collections.abc import Iterator

import torch


def fake_batches(args: Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches, each of `micro_batch_size` sequences of `seq_length` tokens.

    The length is read now: while a segment runs, `args.seq_length` is that of the segment.
    """
    has_mask = args.create_attention_mask_in_dataloader
    return _batches((args.micro_batch_size, args.seq_length), has_mask)


def _batches(shape: tuple[int, int], has_mask: bool) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        batch = {
            "tokens": torch.empty(shape, dtype=torch.long),
            "labels": torch.empty(shape, dtype=torch.long),
            "loss_mask": torch.empty(shape, dtype=torch.float),
            "position_ids": torch.empty(shape, dtype=torch.long),
        }
        if has_mask:
            batch["attention_mask"] = torch.empty((shape[0], 1, shape[1], shape[1]), dtype=torch.bool)
        yield batch
