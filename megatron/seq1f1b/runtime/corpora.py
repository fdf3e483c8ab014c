"""Data sets with so few documents that a part of --split gets none."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.utils import Split

from ..patches import Patch, wrapping
from ..ranks import warn_on_rank_0

_log = logging.getLogger(__name__)

_BLOCK = 4096  # documents


class NoTokens(ValueError):
    """A part of a data set has no tokens."""


def _indices(upstream: Callable, dataset: Any) -> Any:
    if dataset.indices is not None and not _has_tokens(dataset):  # None with --dataloader-fast-cache-load
        part, documents = dataset.index_split.name, len(dataset.dataset.document_indices) - 1
        raise NoTokens(
            f"{dataset.dataset.path_prefix} has {documents} documents, none of them for the {part} part of --split "
            f"{dataset.config.split}; give that part a larger share, or take more text"
        )
    return upstream(dataset)


def _has_tokens(dataset: Any) -> bool:
    lengths, indices = dataset.dataset.sequence_lengths, dataset.indices
    return any(lengths[indices[start : start + _BLOCK]].any() for start in range(0, len(indices), _BLOCK))


def _built(
    upstream: Callable, kind: Callable, is_built_on_rank: Callable[[], bool], synchronizes: bool, *arguments: Any
) -> Any:
    if kind is BlendedDataset and is_built_on_rank() and None in arguments[0]:
        if synchronizes and dist.is_initialized():
            dist.barrier()
        return None  # one of its data sets was left out
    try:
        return upstream(kind, is_built_on_rank, synchronizes, *arguments)
    except NoTokens as error:
        *_, split, _ = arguments
        if split is Split.train:
            raise
        warn_on_rank_0(_log, f"{error}. There is no {split.name} part.")
        if synchronizes and dist.is_initialized() and dist.get_rank() == 0:
            dist.barrier()  # where the other ranks wait until this one has built it
        return None


def _loaders(args: Callable[[], Any], upstream: Callable, provider: Callable) -> tuple:
    was_valid = getattr(args(), "do_valid", False)
    loaders = upstream(provider)
    has_valid = [bool(loaders[1]) and loaders[1][0] is not None]
    dist.broadcast_object_list(has_valid)
    args().do_valid = was_valid or args().do_valid and has_valid[0]
    return loaders


def patches(args: Callable[[], Any]) -> tuple[Patch, ...]:
    """Megatron trains even if evaluations have no documents; `args` gives Megatron's arguments."""
    return (
        wrapping(
            "megatron.core.datasets.gpt_dataset.GPTDataset._build_document_sample_shuffle_indices",
            _indices,
            "adds up epochs of no tokens for ever",
        ),
        Patch(
            "megatron.core.datasets.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder.build_generic_dataset",
            lambda upstream: staticmethod(partial(_built, upstream)),
            "fails if a part for evaluations has no documents",
            wraps=True,
        ),
        wrapping(
            "megatron.training.training.build_train_valid_test_data_loaders",
            partial(_loaders, args),
            "evaluates on a data set that is not there",
        ),
    )
