"""Batches without values, in the form of those of Megatron's GPTDataset."""

from argparse import Namespace
from collections.abc import Iterator

import torch


def fake_batches(args: Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end, each of `micro_batch_size` sequences of `seq_length` tokens."""
    shape = args.micro_batch_size, args.seq_length
    while True:
        batch = {
            "tokens": torch.empty(shape, dtype=torch.long),
            "labels": torch.empty(shape, dtype=torch.long),
            "loss_mask": torch.empty(shape, dtype=torch.float),
            "position_ids": torch.empty(shape, dtype=torch.long),
        }
        if args.create_attention_mask_in_dataloader:
            batch["attention_mask"] = torch.empty((shape[0], 1, shape[1], shape[1]), dtype=torch.bool)
        yield batch
