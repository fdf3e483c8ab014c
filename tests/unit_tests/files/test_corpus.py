"""A corpus that is damaged is named before a training starts, not in the step that reads there."""

import re
import struct

import pytest

from megatron.seq1f1b.files.corpus import check_corpus

# Two sequences, of 3 and 5 tokens of type 8 (2 bytes), and as many documents.
INDEX = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 3, 5, 0, 6, 0, 1, 2)
EMPTY = b"MMIDIDX\x00\x00" + struct.pack("<QBQQq", 1, 8, 0, 1, 0)


def corpus(folder, index, tokens):
    (folder / "mine.idx").write_bytes(index)
    if tokens is not None:
        (folder / "mine.bin").write_bytes(bytes(tokens))
    return str(folder / "mine")


@pytest.mark.parametrize(
    "index, tokens",
    [(INDEX, 16), (INDEX + bytes(2), 16), (INDEX, 20), (EMPTY, 0)],
    ids=["whole", "with modes", "with more tokens", "empty"],
)
def test_a_whole_corpus_is_accepted(tmp_path, index, tokens):
    check_corpus(corpus(tmp_path, index, tokens))


@pytest.mark.parametrize(
    "index, tokens, sentence",
    [
        (
            b"TNTIDX\x00\x00" + bytes(40),
            16,
            "mine.idx: it is no index of a corpus of Megatron; copy the corpus again, or",
        ),
        (INDEX[:20], 16, "mine.idx: it is no index of a corpus of Megatron"),
        (
            INDEX.replace(b"\x00\x00\x01", b"\x00\x00\x07", 1),
            16,
            "mine.idx: it has version 7 and type 8 of tokens, and",
        ),
        (INDEX.replace(b"\x08", b"\x09", 1), 16, "mine.idx: it has version 1 and type 9 of tokens, and Megatron reads"),
        (INDEX[:60], 16, "mine.idx: it is cut off, since it has 60 bytes in place of 82; copy the corpus again, or"),
        (INDEX, 15, "mine.bin: it is cut off, since it has 15 bytes, and its index needs 16; copy the corpus"),
        (INDEX, None, "mine.bin: No such file or directory; copy the corpus again, or make it again with"),
    ],
    ids=["format", "header", "version", "type", "index", "tokens", "no tokens"],
)
def test_a_damaged_corpus_is_one_sentence(tmp_path, index, tokens, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(f"{tmp_path}/{sentence}")):
        check_corpus(corpus(tmp_path, index, tokens))
