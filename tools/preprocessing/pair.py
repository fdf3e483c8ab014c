"""The .bin/.idx pair: both files appear, complete, or neither does."""

import contextlib
import os
import tempfile
from pathlib import Path

from preprocessing.stopping import refuse_existing, signals_held


@contextlib.contextmanager
def indexed_pair(prefix: str, overwrite: bool, dtype: type):
    """A Megatron builder whose two files take their final names only if the block succeeds."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    target_bin, target_idx = pair_paths(prefix)
    target_bin.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target_bin.parent, prefix=f".{target_bin.stem}-") as new:
        builder = IndexedDatasetBuilder(f"{new}/bin", dtype=dtype)
        try:
            yield builder
            builder.finalize(f"{new}/idx")
        finally:
            builder.data_file.close()
        with signals_held():
            refuse_existing((target_bin, target_idx), overwrite, "--output-prefix")
            # A reader opens the index first: it must never see one that is not its data's.
            target_idx.unlink(missing_ok=True)
            os.replace(f"{new}/bin", target_bin)
            os.replace(f"{new}/idx", target_idx)


def pair_paths(prefix: str) -> tuple[Path, Path]:
    return Path(prefix + ".bin"), Path(prefix + ".idx")
