"""Data sets with so few documents that a part of --split gets none."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from ..process.patches import Patch, wrapping
from ..process.ranks import warn_on_rank_0

_log = logging.getLogger(__name__)


def _built(
    upstream: Callable, kind: Any, is_built_on_rank: Callable[[], bool], synchronizes: bool, *arguments: Any
) -> Any:
    if not is_built_on_rank() or not _is_left_out(kind, arguments):
        return upstream(kind, is_built_on_rank, synchronizes, *arguments)
    if synchronizes and dist.is_initialized():
        dist.barrier()  # where ranks that build nothing wait
    return None


def _is_left_out(kind: Any, arguments: tuple) -> bool:
    """Whether a part for evaluations has no tokens; raises ValueError for training."""
    if kind is BlendedDataset:
        return None in arguments[0]
    if not (isinstance(kind, type) and issubclass(kind, GPTDataset)):
        return False
    dataset, _, indices, _, split, config = arguments
    # Megatron has no indices with --dataloader-fast-cache-load.
    if indices is None or any(dataset.sequence_lengths[index] for index in indices):
        return False
    reason = (
        f"{dataset.path_prefix} has {len(dataset.document_indices) - 1} documents, none of them for the {split.name} "
        f"part of --split {config.split}; give that part a larger share, or take more text"
    )
    if split is Split.train:
        raise ValueError(reason)
    warn_on_rank_0(_log, f"{reason}. There is no {split.name} part.")
    return True


def _loaders(args: Callable[[], Any], upstream: Callable, provider: Callable) -> tuple:
    was_valid = getattr(args(), "do_valid", False)
    loaders = upstream(provider)
    has_valid = [bool(loaders[1]) and loaders[1][0] is not None]
    dist.broadcast_object_list(has_valid)
    args().do_valid = was_valid or args().do_valid and has_valid[0]
    return loaders


def patches(args: Callable[[], Any]) -> tuple[Patch, ...]:
    """Megatron trains even if evaluations have no documents; `args` gives Megatron's arguments."""
    builder = "megatron.core.datasets.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder"
    return (
        Patch(
            f"{builder}.build_generic_dataset",
            lambda upstream: staticmethod(partial(_built, upstream)),
            "adds up epochs of no tokens for ever",
            wraps=True,
        ),
        wrapping(
            "megatron.training.training.build_train_valid_test_data_loaders",
            partial(_loaders, args),
            "evaluates on a data set that is not there",
        ),
    )
