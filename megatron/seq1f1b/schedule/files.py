"""Reads files of unknown content, with errors in plain words, and writes files whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    try:
        return (read_bytes(path) if content is None else content).decode("utf-8-sig")
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


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; the complete file is then renamed to `path`. A full disk or an interrupt
    leaves the earlier file as it was. Raises ValueError, with the name of the file, if it cannot be written."""
    path = Path(path).resolve()
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
