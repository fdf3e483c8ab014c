"""The .bin/.idx pair: both files appear, complete, or neither does; an old pair is there until the new one is."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .durable import move
from .stopping import refuse_existing, signals_held


@contextlib.contextmanager
def indexed_pair(prefix: str, overwrite: bool, dtype: type) -> Iterator[Any]:
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
            put_in_place(Path(new), prefix)


def put_in_place(new: Path, prefix: str) -> None:
    """Move `bin` and `idx` in the folder `new` to their names, and an old pair away until both are there.

    A reader opens the index first: it never finds an index without its own data. After a kill at any step, `recover`
    finds the old pair or the new one complete.
    """
    target_bin, target_idx = pair_paths(prefix)
    aside = _aside(prefix)
    if target_idx.exists() or target_bin.exists():
        aside.mkdir()
        # In this order an index that is set aside always has its data, there or still in place.
        for target, name in ((target_idx, "idx"), (target_bin, "bin")):
            if target.exists():
                move(target, aside / name)
    move(new / "bin", target_bin)
    move(new / "idx", target_idx)
    _remove(aside)


def recover(prefix: str) -> None:
    """Finish after a run that was killed while it replaced a pair: if the new pair is incomplete, restore the old
    one."""
    target_bin, target_idx = pair_paths(prefix)
    aside = _aside(prefix)
    if not target_idx.exists():
        for name, target in (("bin", target_bin), ("idx", target_idx)):
            if (aside / name).exists():
                move(aside / name, target)
    _remove(aside)


def pair_paths(prefix: str) -> tuple[Path, Path]:
    return Path(prefix + ".bin"), Path(prefix + ".idx")


def _aside(prefix: str) -> Path:
    """The folder in which an old pair waits for the new one."""
    path = Path(prefix)
    return path.with_name(f".{path.name}-replaced")


def _remove(aside: Path) -> None:
    if aside.exists():
        # The index first: data without one are unusable, and `recover` never restores an index alone.
        for name in ("idx", "bin"):
            (aside / name).unlink(missing_ok=True)
        aside.rmdir()
