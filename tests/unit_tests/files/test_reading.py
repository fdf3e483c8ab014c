"""Files, pipes and devices are read to their ends, and nobody waits for an end that may never come."""

import os
from pathlib import Path
from threading import Thread

import pytest

from megatron.seq1f1b.files import reading
from megatron.seq1f1b.files.reading import read_bytes, read_text


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_is_read_to_its_end(pipe):
    writer = Thread(target=lambda: pipe.write_bytes(b"0F0\n" * 50_000))
    writer.start()
    assert read_bytes(pipe) == b"0F0\n" * 50_000
    writer.join()


def test_a_pipe_to_which_nobody_writes_is_named(pipe, monkeypatch):
    monkeypatch.setattr(reading, "_PATIENCE", 0.1)
    with pytest.raises(ValueError, match=r"pipe: nobody has written to this pipe for 0.1 s; name a file"):
        read_bytes(pipe)


def test_the_end_of_an_unnamed_pipe_is_the_end(tmp_path):
    """As of `seq1f1b check <(true)`, whose writer may be gone before it is read."""
    source, target = os.pipe()
    os.close(target)
    assert read_bytes(f"/dev/fd/{source}") == b""
    os.close(source)


def test_a_device_without_an_end_is_named(monkeypatch):
    monkeypatch.setattr(reading, "_MOST", 1000)
    with pytest.raises(ValueError, match=r"/dev/zero: it does not end within 1,000 bytes; name a file"):
        read_bytes(Path("/dev/zero"))
    assert read_bytes("/dev/null") == b""


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    """Here one of a tebibyte of zeros, which take no room on the disk."""
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(ValueError, match=r"sparse: it has 1,099,511,627,776 bytes, and the most are 1,073,741,824 "):
        read_text(path)


def test_zeros_are_no_text(tmp_path):
    """Though they are UTF-8; a gibibyte of them is not parsed."""
    (tmp_path / "zeros").write_bytes(bytes(1000))
    with pytest.raises(ValueError, match=r"zeros: it is not UTF-8 text"):
        read_text(tmp_path / "zeros")
