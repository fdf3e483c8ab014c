"""Files that take their final names only when their contents are on the disk, whatever ends the machine."""

import os
from pathlib import Path


def move(source: Path, target: Path) -> None:
    """Rename a written file over `target`. A loss of power afterwards costs neither the name nor the contents."""
    sync(source)
    os.replace(source, target)
    sync(target.parent)
    if source.parent != target.parent:
        sync(source.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
