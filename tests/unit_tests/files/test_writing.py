"""Files are written whole or not at all."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron.seq1f1b.files.writing import written_together, written_whole


def test_what_is_written_through_a_link_is_where_it_points(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "later")
    with written_whole(tmp_path / "link") as unfinished:
        unfinished.write_text("x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "later").read_text() == "x"


def test_a_kill_between_two_files_leaves_no_mixture(tmp_path, monkeypatch):
    """The last of them tells that all are complete, and none of the earlier ones tells that of the new."""
    first = tmp_path / "first"
    last = tmp_path / "last"
    for path in (first, last):
        path.write_text("old")
    kills = RuntimeError("killed")
    monkeypatch.setattr(Path, "replace", Mock(side_effect=[None, kills]))
    with pytest.raises(RuntimeError), written_together(first, last) as unfinished:
        for path in unfinished:
            path.write_text("new")
    assert not last.exists()
