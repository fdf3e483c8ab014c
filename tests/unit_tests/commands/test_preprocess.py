"""`seq1f1b preprocess` writes what Megatron's own tool writes, and all of it or nothing."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.seq1f1b.commands import preprocess, run
from megatron.seq1f1b.commands.corpus_documents import Document, documents, find_files
from megatron.seq1f1b.commands.document_encoder import Encoder
from megatron.seq1f1b.commands.encoding_workers import encoded
from support.files import write_corpus, write_files
from support.patience import patient

# Three batches, so that two workers have to keep their order.
TEXTS = [f"def f_{i}(x):\n\treturn x + {i}  # größer 🙂\n" for i in range(3000)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with a.jsonl, and a tokenizer and the pair `one` made from it."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    assert made(folder, folder / "a.jsonl", "one", "--train-tokenizer", "400", "--append-eod", "--workers", "2") == 0
    return folder


def command(corpus: Path, source: Path, prefix: str, *flags: str) -> list[str]:
    named = ["--input", source, "--output-prefix", corpus / prefix, "--tokenizer-model", corpus / "tokenizer"]
    return list(map(str, [*named, "--workers", "1", *flags]))


def made(corpus: Path, source: Path, prefix: str, *flags: str) -> int:
    return run("preprocess", command(corpus, source, prefix, *flags))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def pair(prefix: Path) -> list[bytes]:
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in (".bin", ".idx")]


def encoded_by(folder: Path, texts: list[str], *flags: str) -> tuple:
    """The tokenizer of the folder, and the ids of some texts."""
    encoder = Encoder(preprocess.parse_args(command(folder, folder, "x", *flags)))
    return encoder.tokenizer, encoder.encode([Document("place", text.encode(), False) for text in texts])


def test_the_pair_is_upstreams_byte_for_byte(corpus, tmp_path):
    tokenizer, _ = encoded_by(corpus, ["x"])
    assert (tokenizer.vocab_size, tokenizer.eod) == (400, 0) and tokenizer.pad not in (0, None, -1)
    upstream = write_corpus(tmp_path / "upstream", ([*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS))
    assert pair(corpus / "one") == pair(upstream)
    (tmp_path / "keys.jsonl").write_text("".join(json.dumps({"code": text, "text": ""}) + "\n" for text in TEXTS))
    assert made(corpus, tmp_path / "keys.jsonl", "again", "--append-eod", "--json-key", "code") == 0
    assert pair(corpus / "again") == pair(corpus / "one")


@pytest.mark.parametrize("special", [True, False])
def test_many_texts_at_once_have_the_ids_of_each_alone(corpus, tmp_path, special):
    """Neither cut nor padded, and with the special tokens that single texts have."""
    from tokenizers import Tokenizer as Rust
    from tokenizers.processors import TemplateProcessing

    shutil.copytree(corpus / "tokenizer", tmp_path / "tokenizer")
    rust = Rust.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    rust.enable_truncation(5)
    rust.enable_padding(length=8)
    rust.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    rust.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    texts = [*TEXTS[:50], "a<|endoftext|>b", " leading", "\u0301 é "]
    tokenizer, batch = encoded_by(tmp_path, texts, *([] if special else ["--tokenizer-hf-no-include-special-tokens"]))
    assert [ids.tolist() for ids in batch] == [tokenizer.tokenize(text) for text in texts]
    assert all((ids[0] == 0) == special for ids in batch) and len(batch[0]) > 8


def test_ids_outside_the_vocabulary_are_the_documents_fault(corpus):
    flags = "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod"
    _, (good, outside, refused) = encoded_by(corpus, ["1 2 99", "100", "x"], *flags)
    assert good.dtype == np.uint16 and good.tolist() == [1, 2, 99, 99]
    assert outside == "token id outside the vocabulary of 100"
    assert "invalid literal" in refused


def test_folders_are_searched_in_order_and_pipes_left_alone(corpus, tmp_path, capsys):
    write_files(tmp_path, dict.fromkeys(("b/2.py", "a/1.py", "a/skip/3.py", "c.txt"), "x = 1\n"))
    os.mkfifo(tmp_path / "pipe.py")
    found = find_files([str(tmp_path)], "*.py")
    assert [os.path.relpath(path, tmp_path) for path in found] == ["a/1.py", "a/skip/3.py", "b/2.py"]
    assert made(corpus, tmp_path, "folder", "--glob", "*.py") == 0
    assert "3 documents, " in capsys.readouterr().out


def test_bad_documents_stop_the_run_or_are_skipped(corpus, tmp_path, capsys):
    source, before = tmp_path / "bad.jsonl", names(corpus)
    lines = b'{"text": "good"}\n{"t": 1}\n\n\xff\n[1]\n{"text": 2}\n{"text": " "}\n{\n'
    source.write_bytes(lines + b'{"text": "\\ud800"}\n{"text": "too"}\n')
    assert made(corpus, source, "bad") == 2
    error = capsys.readouterr().err
    assert f"error: --input {source}:2: 'text' is missing" in error and "--on-error skip" in error
    assert names(corpus) == before
    assert made(corpus, source, "bad", "--on-error", "skip") == 0
    out, error = capsys.readouterr()
    assert "2 documents, " in out and "; 8 skipped." in out
    not_json = "it is not JSON"
    wrong = "expected names with values, not a list", "text: expected text, not 2", "it is empty", not_json
    reasons = "'text' is missing", not_json, "it is not UTF-8", *wrong, "TextEncodeInput must be"
    for line, reason in enumerate(reasons, 2):
        assert f"skipped {source}:{line}: {reason}" in error
    (tmp_path / "empty.txt").touch()
    assert made(corpus, tmp_path / "empty.txt", "none", "--on-error", "skip") == 2
    assert made(tmp_path, tmp_path / "empty.txt", "none", "--train-tokenizer", "300") == 2
    assert "none.bin" not in names(corpus) and names(tmp_path) == {"bad.jsonl", "empty.txt"}


def test_an_existing_pair_or_tokenizer_is_replaced_on_request(corpus, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    assert made(corpus, tmp_path / "a.txt", "replaced") == 0
    before = pair(corpus / "replaced")
    (tmp_path / "a.txt").write_text("hello, world")
    assert made(corpus, tmp_path / "a.txt", "replaced") == 2
    assert "replaced.bin exists" in capsys.readouterr().err
    assert made(corpus, tmp_path / "a.txt", "new", "--train-tokenizer", "300") == 2
    assert "tokenizer.json exists" in capsys.readouterr().err
    assert pair(corpus / "replaced") == before
    assert made(corpus, tmp_path / "a.txt", "replaced", "--overwrite") == 0
    assert len(pair(corpus / "replaced")[0]) > len(before[0])


def test_a_run_that_ends_early_leaves_all_files_as_they_were(corpus, tmp_path, monkeypatch, capsys):
    """All files of a run take their places together, so tokens never lie beside the tokenizer of another run."""
    shutil.copytree(corpus / "tokenizer", tmp_path / "tokenizer")
    for ending in (".bin", ".idx"):
        shutil.copy(corpus / f"one{ending}", tmp_path / f"one{ending}")
    (tmp_path / "a.txt").write_text("another text " * 20_000)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    again = tmp_path, tmp_path / "a.txt", "one", "--overwrite", "--train-tokenizer", "270"

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))  # the tokenizer fits, the tokens do not
    try:
        assert made(*again) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path / 'one.idx'}: cannot be written: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before

    monkeypatch.setattr(preprocess, "write_pair", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit):
        made(*again)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before

    monkeypatch.undo()
    assert made(*again) == 0
    assert {path.name for path in before if path.read_bytes() != before[path]} == {
        "one.bin",
        "one.idx",
        "tokenizer.json",
    }


def test_json_lines_are_known_by_any_ending_of_theirs(tmp_path):
    lines = "a.JSONL", "a.jsonl.txt", "a.Json", "a.ndjson"
    write_files(tmp_path, dict.fromkeys((*lines, "a.txt", "jsonl"), "{}"))
    found = {Path(document.place.split(":")[0]).name for document in documents(tmp_path.iterdir()) if document.is_json}
    assert found == {*lines}


def test_a_worker_that_dies_ends_the_run(corpus):
    dies = SimpleNamespace(encode=lambda texts: os._exit(1))
    with pytest.raises(ValueError, match="a process that tokenizes was killed, .*; try fewer than --workers 2"):
        list(encoded([Document("a", b"text", False)] * 900, dies, 2))
    with pytest.raises(ValueError, match="; cut the longest documents"):
        list(encoded([Document("a", b"text", False)], dies, 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_run_and_its_workers(corpus, tmp_path, number):
    """The run waits in the middle of a stream; what it wrote so far goes, unless it is killed."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    # Opened for reading, too, it waits for no reader, and holds what is written.
    pipe = os.open(tmp_path / "pipe.jsonl", os.O_RDWR)
    assert os.write(pipe, b'{"text": "hello"}\n' * 3000) == 54_000
    words = command(corpus, tmp_path / "pipe.jsonl", "out", "--output-prefix", tmp_path / "out")
    process = started(words, number)
    try:
        until = time.monotonic() + patient(60)
        while not list(tmp_path.glob(".*/out.bin")):
            assert time.monotonic() < until and process.is_alive()
            time.sleep(0.05)
        os.kill(process.pid, number)
        assert has_ended(process)
        assert number is signal.SIGKILL or names(tmp_path) == {"pipe.jsonl"}
    finally:
        process.kill()
        os.close(pipe)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_workers_ends_the_run(corpus, tmp_path, number):
    words = command(corpus, corpus / "a.jsonl", "out", "--output-prefix", tmp_path / "out", "--workers", "2")
    process = started(words, number, after_fork=True)
    try:
        assert has_ended(process) and not names(tmp_path)
    finally:
        process.kill()


def started(words: list[str], number: int, after_fork: bool = False) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=in_own_session, args=(words, number, after_fork))
    process.start()
    return process


def in_own_session(words: list[str], number: int, after_fork: bool) -> None:
    """Run the command; `after_fork` it is sent the signal as soon as it has started its second process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background of a shell
    fork = os.fork
    children = []

    def fork_and_signal() -> int:
        children.append(fork())
        if len(children) == 2 and children[-1]:
            signal.raise_signal(number)
        return children[-1]

    if after_fork:
        os.fork = fork_and_signal
    sys.exit(run("preprocess", words))


def has_ended(process: multiprocessing.Process) -> bool:
    """Whether it has, soon and by the signal, with all that it started."""
    until = time.monotonic() + patient(20)
    process.join(timeout=patient(20))
    while workers_of(process.pid) and time.monotonic() < until:
        time.sleep(0.05)
    return process.exitcode not in (None, 0) and not workers_of(process.pid)


def workers_of(session: int) -> str:
    return subprocess.run(["ps", "-o", "pid=", "-s", str(session)], capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("flags, sentence", [([], "name a tokenizer's folder"), (["--tokenizer-model", "t"], "x does")])
def test_mistakes_show_before_megatron_is_imported(flags, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "megatron.training.argument_utils", None)
    assert run("preprocess", ["--input", "x", "--output-prefix", "out", *flags]) == 2
    assert sentence in capsys.readouterr().err
