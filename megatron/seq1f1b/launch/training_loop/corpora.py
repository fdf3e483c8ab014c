"""Corpora of Megatron's training loop with parts that have too few documents.

Tested in functional_tests/test_training_features.py by test_a_part_without_documents_is_left_out.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from ...arguments.megatron_run import host_memory
from ...process.patches import Patch, PatchTable, wrapping
from ...process.ranks import warn_on_rank_0

_MANY = 10**8  # samples
_INDEX_BYTES = 12  # of a sample: two numbers for where it starts, and one for its place in the order


class _Samples(NamedTuple):
    """The arguments of a data set of samples of one corpus (MegatronDataset)."""

    corpus: Any
    path: str | None
    documents: Any  # their indices; None with --dataloader-fast-cache-load
    num_samples: int | None
    split: Split
    config: Any


class Corpora:
    """Wraps functions that build data sets; `args()` returns Megatron's arguments."""

    def __init__(self, args: Callable[[], Namespace]) -> None:
        self._args = args

    def patches(self) -> PatchTable:
        builder = "megatron.core.datasets.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder"
        loaders = "megatron.training.training.build_train_valid_test_data_loaders"
        return (
            wrapping(loaders, self.loaders, "evaluates without data"),
            Patch(
                f"{builder}.build_generic_dataset",
                lambda upstream: staticmethod(partial(_built, upstream)),
                "adds up epochs of no tokens for ever",
                wraps=True,
            ),
        )

    def loaders(self, upstream: Callable, provider: Callable) -> tuple:
        """Turn evaluations off if no data set is left for them."""
        was_valid = getattr(self._args(), "do_valid", False)
        train, valid, test = upstream(provider)
        has_valid = [bool(valid) and valid[0] is not None]
        dist.broadcast_object_list(has_valid)
        self._args().do_valid = was_valid or (self._args().do_valid and has_valid[0])
        return train, valid, test


def _built(upstream: Callable, kind: Any, is_built: Callable[[], bool], synchronizes: bool, *arguments: Any) -> Any:
    """A data set; None for a part of --split that has too few documents."""
    if is_built():
        _check_size(kind, arguments)
        if _is_left_out(kind, arguments):
            if synchronizes and dist.is_initialized():
                dist.barrier()  # ranks that build nothing wait there
            return None
    return upstream(kind, is_built, synchronizes, *arguments)


def _is_of_samples(kind: Any) -> bool:
    """Whether a data set is of samples of one corpus, not of several data sets."""
    return isinstance(kind, type) and issubclass(kind, GPTDataset)


def _check_size(kind: Any, arguments: tuple) -> None:
    """Raise ValueError for more samples than the memory of this host has numbers for. Megatron counts the epochs that
    they take one by one before it asks for that memory, which may go on for ever."""
    if not _is_of_samples(kind):
        return
    samples = _Samples(*arguments)
    num_samples = samples.num_samples or 0
    needed = _INDEX_BYTES * num_samples
    memory = host_memory()
    part = samples.split.name
    if needed > memory:
        flag = "--eval-iters or a larger --eval-interval"
        if samples.split is Split.train:
            flag = "--train-iters or --train-samples"
        raise ValueError(
            f"{num_samples:,} samples for the {part} part need an index of {needed / 2**30:,.0f} GiB, and "
            f"this host has {memory / 2**30:,.0f} GiB; give a smaller {flag}"
        )
    if num_samples > _MANY:
        warn_on_rank_0(f"the index of {num_samples:,} samples for the {part} part is made, which takes minutes")


def _is_left_out(kind: Any, arguments: tuple) -> bool:
    """Whether a part for evaluations has no tokens; raises ValueError for training."""
    if kind is BlendedDataset:
        return None in arguments[0]
    if not _is_of_samples(kind):
        return False
    samples = _Samples(*arguments)
    corpus = samples.corpus
    if samples.documents is None or any(corpus.sequence_lengths[document] for document in samples.documents):
        return False
    part = samples.split.name
    reason = (
        f"{corpus.path_prefix} has {len(corpus.document_indices) - 1} documents, none of them for the {part} part of "
        f"--split {samples.config.split}; give that part a larger share, or take more text"
    )
    if samples.split is Split.train:
        raise ValueError(reason)
    warn_on_rank_0(f"{reason}. There is no {part} part.")
    return True
