"""Parts of the input whose tokens stay on the disk when a run is killed, so that the next one goes on after them.

They lie in a folder beside the pair: `.NAME-parts/3.bin`, `3.idx` and `3.json`, the last written last. `settings.json`
records what they were made of and how; parts of anything else are deleted.
"""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from .documents import Record
from .durable import move
from .progress import Counts


def numbered(records: Iterable[Record], total: int, count: int) -> Iterator[tuple[int, Iterable[Record]]]:
    """The records in `count` consecutive parts of about equal bytes, of `total`, each with its part's number."""
    done = 0

    def part_of(record: Record) -> int:
        nonlocal done
        number = min(done * count // max(total, 1), count - 1)
        done += len(record.raw)
        return number

    yield from groupby(records, key=part_of)


class Partitions:
    """The parts of the pair at `prefix`; their folder is deleted when the block ends without an exception."""

    def __init__(self, prefix: str, settings: dict[str, Any], dtype: type) -> None:
        path = Path(prefix)
        self._folder = path.with_name(f".{path.name}-parts")
        self._settings = json.loads(json.dumps(settings))
        self._dtype = dtype
        self._numbers: list[int] = []

    def __enter__(self) -> "Partitions":
        path = self._folder / "settings.json"
        if self._folder.exists() and not (path.exists() and json.loads(path.read_text()) == self._settings):
            shutil.rmtree(self._folder)
        if not self._folder.exists():
            self._folder.mkdir(parents=True)
            self._write(path, self._settings)
        done = len(list(self._folder.glob("[0-9]*.json")))
        if done:
            print(f"{done} partition(s) of an earlier run are done.", flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            shutil.rmtree(self._folder)

    def has(self, number: int) -> bool:
        """Whether the part is complete; it will be merged either way."""
        self._numbers.append(number)
        return (self._folder / f"{number}.json").exists()

    @contextlib.contextmanager
    def builder(self, number: int) -> Iterator[Any]:
        """A Megatron builder of the part."""
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(str(self._folder / f"{number}.bin"), dtype=self._dtype)
        try:
            yield builder
            builder.finalize(str(self._folder / f"{number}.idx"))
        finally:
            builder.data_file.close()

    def finish(self, number: int, counts: Counts) -> None:
        """Mark the part as complete."""
        self._write(self._folder / f"{number}.json", asdict(counts))

    def merge_into(self, builder: Any) -> Iterator[Counts]:
        """Add all parts in order; returns what each holds."""
        for number in self._numbers:
            counts = json.loads((self._folder / f"{number}.json").read_text())
            if counts["documents"]:
                builder.add_index(str(self._folder / str(number)))
            yield Counts(counts["documents"], counts["tokens"], Counter(counts["skipped"]))

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(value))
        move(new, path)
