"""A pair is replaced in steps: a kill before any of them leaves a whole pair, and a reader never sees two halves."""

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

from megatron.seq1f1b.commands import preprocess as preprocess_data
from megatron.seq1f1b.preprocessing.durable import move
from megatron.seq1f1b.preprocessing.pair import put_in_place, recover
from support.patience import patient

# Replaces a pair, and kills itself before its n-th change of a name in the file system.
KILLED = """
import os, signal, sys
from pathlib import Path
from megatron.seq1f1b.preprocessing.pair import put_in_place, recover
function, folder, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
events = []
def watch(event, arguments):
    if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        events.append(event)
        if len(events) == step:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
if function == "replace":
    put_in_place(folder / "new", str(folder / "data"))
else:
    recover(str(folder / "data"))
"""


def pair_in(folder: Path) -> tuple[str, str] | None:
    """What a reader gets, who opens the index first and then the data; None if there is no index."""
    if not (folder / "data.idx").exists():
        return None
    return (folder / "data.idx").read_text(), (folder / "data.bin").read_text()


def folder_with(path: Path, old: bool) -> Path:
    (path / "new").mkdir(parents=True)
    for name in ("bin", "idx"):
        (path / "new" / name).write_text("new")
        if old:
            (path / f"data.{name}").write_text("old")
    return path


def killed(function: str, folder: Path, step: int) -> bool:
    """Whether the run got as far as that step."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", KILLED, function, folder, step]
    run = subprocess.run([*map(str, command)], cwd=root, capture_output=True, text=True, timeout=patient(120))
    assert run.returncode in (0, -signal.SIGKILL), run.stderr
    return run.returncode != 0


def test_a_kill_while_replacing_a_pair_loses_nothing(tmp_path):
    for step in count(1):
        folder = folder_with(tmp_path / str(step), old=True)
        was_killed = killed("replace", folder, step)
        assert pair_in(folder) in (("old", "old"), ("new", "new"), None)
        recover(str(folder / "data"))
        if not was_killed:
            break
        assert pair_in(folder) in (("old", "old"), ("new", "new")), f"killed before step {step}"
        assert {path.name for path in folder.iterdir()} == {"data.bin", "data.idx", "new"}
    assert step > 7 and pair_in(folder) == ("new", "new")


def test_a_kill_while_bringing_back_a_pair_loses_nothing(tmp_path):
    for step in count(1):
        folder = folder_with(tmp_path / str(step), old=True)
        assert killed("replace", folder, 5), "before the new index is put in place"
        was_killed = killed("recover", folder, step)
        assert pair_in(folder) in (("old", "old"), None)
        recover(str(folder / "data"))
        assert pair_in(folder) == ("old", "old")
        if not was_killed:
            break
    assert step > 3


def test_a_first_pair_needs_nothing_aside(tmp_path):
    folder = folder_with(tmp_path / "first", old=False)
    put_in_place(folder / "new", str(folder / "data"))
    assert pair_in(folder) == ("new", "new")
    assert {path.name for path in folder.iterdir()} == {"data.bin", "data.idx", "new"}


def test_contents_reach_the_disk_before_their_name(tmp_path, monkeypatch):
    steps: list[tuple[str, int]] = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(("sync", os.fstat(fd).st_ino)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(("rename", os.stat(a).st_ino)), replace(a, b)))
    source = tmp_path / "source"
    source.write_text("contents")
    file, folder = source.stat().st_ino, tmp_path.stat().st_ino
    move(source, tmp_path / "target")
    assert steps == [("sync", file), ("rename", file), ("sync", folder)]


def test_the_tool_recovers_before_it_looks_for_an_old_pair(tmp_path, capsys):
    folder = folder_with(tmp_path / "killed", old=True)
    assert killed("replace", folder, 4) and pair_in(folder) is None
    (folder / "a.txt").write_text("hello")
    flags = ["--input", folder / "a.txt", "--output-prefix", folder / "data", "--tokenizer-type", "NullTokenizer"]
    assert preprocess_data.run([*map(str, flags), "--vocab-size", "100"]) == 2
    assert "data.bin exists" in capsys.readouterr().err
    assert pair_in(folder) == ("old", "old")
