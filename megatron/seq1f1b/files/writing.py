"""Files that are written whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path, in a folder beside `path`; the complete file then takes its place. A full disk or an
    interrupt leaves the earlier file as it was. Raises OSError, with the name of the file, if it cannot be written.
    """
    with written_together(path) as (unfinished,):
        yield unfinished


@contextmanager
def written_together(*paths: str | Path) -> Iterator[list[Path]]:
    """Yields temporary paths for several files, which take their places in this order when all are complete. The last
    of the earlier files is removed first, so that even a kill in between leaves no complete mixture. Raises OSError,
    with the names of the files, if they cannot be written."""
    targets = [Path(path).resolve() for path in paths]
    folders = {target.parent: target.parent / f".{os.getpid()}.unfinished" for target in targets}
    new: list[Path] = []  # folders that are made here, and removed if nothing is written to them
    for folder in folders:
        new += [parent for parent in (folder, *folder.parents) if not parent.exists()]
    unfinished = [folders[target.parent] / target.name for target in targets]
    try:
        for parent, folder in folders.items():
            try:
                folder.mkdir(parents=True)
            except OSError as error:
                raise unwritable(error, *(target for target in targets if target.parent == parent)) from None
        yield unfinished
        if len(targets) > 1:
            targets[-1].unlink(missing_ok=True)
        for source, target in zip(unfinished, targets, strict=True):
            source.replace(target)
    except OSError as error:
        is_of_others = error.filename is not None and Path(error.filename).parent not in folders.values()
        if is_of_others:
            raise
        raise unwritable(error, *paths) from None
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        for folder in new:
            with suppress(OSError):  # it has what was written, or the folder of somebody else
                folder.rmdir()


def unwritable(error: OSError, *paths: str | Path) -> OSError:
    """The error of writing these files, which may have lost their names: a full disk names none."""
    return OSError(error.errno, f"cannot be written: {error.strerror or error}", ", ".join(map(str, paths)))
