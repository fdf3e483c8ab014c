"""Whatever a stream is, a sentence can be printed to it."""

import io
import sys

from megatron.seq1f1b.process.streams import prepare_streams


def test_bytes_that_are_no_text_are_printed(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="utf-8", errors="strict"))
    prepare_streams()
    print("caf\udce9", flush=True)
    assert printed.getvalue() == b"caf\\udce9\n"


def test_a_closed_stream_takes_what_is_printed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    prepare_streams()
    print("nobody reads this", flush=True)
    sys.stdout.flush()
