"""Reads files of unknown content, with errors in plain words, and writes files whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MOST = 2**30  # bytes of a pipe or device, which may have no end


def read_bytes(path: str | Path) -> bytes:
    """The content of a file or pipe. Raises ValueError, with the name of the file, if it cannot be read."""
    try:
        with open(path, "rb") as file:
            if Path(path).is_file():
                return file.read()
            content = file.read(_MOST + 1)
    except OSError as error:
        raise ValueError(f"{path}: {reason(error)}") from error
    if len(content) > _MOST:
        raise ValueError(f"{path}: it does not end within {_MOST:,} bytes; name a file")
    return content


def read_text(path: str | Path, content: bytes | None = None) -> str:
    """The text of a UTF-8 file, or of what is known to be its `content`. Raises ValueError, with the name of the file,
    if it cannot be read."""
    if content is None:
        content = read_bytes(path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What is wrong with a file, or with JSON in it, in words."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error.msg}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def named(error: OSError, *paths: str | Path) -> OSError:
    """The error of writing these files, which may have lost their names: a full disk names none."""
    return OSError(error.errno, f"cannot be written: {error.strerror or error}", ", ".join(map(str, paths)))


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
        for folder in folders.values():
            folder.mkdir(parents=True)
        yield unfinished
        if len(targets) > 1:
            targets[-1].unlink(missing_ok=True)
        for source, target in zip(unfinished, targets, strict=True):
            source.replace(target)
    except OSError as error:
        is_of_others = error.filename is not None and Path(error.filename).parent not in folders.values()
        if is_of_others:
            raise
        raise named(error, *paths) from None
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        for folder in new:
            with suppress(OSError):  # it has what was written, or the folder of somebody else
                folder.rmdir()
