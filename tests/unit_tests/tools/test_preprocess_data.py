"""The whole tool: what it writes is what Megatron reads, and it writes all of it or nothing."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.seq1f1b.commands import preprocess as preprocess_data
from megatron.seq1f1b.preprocessing import progress
from megatron.seq1f1b.preprocessing.documents import Record
from megatron.seq1f1b.preprocessing.partitions import Partitions
from megatron.seq1f1b.preprocessing.stopping import Refused
from megatron.seq1f1b.preprocessing.tokenizer import (
    batch_call,
    load_megatron_tokenizer,
    load_tokenizer,
    load_trained_tokenizer,
)
from megatron.seq1f1b.preprocessing.workers import results, started_workers, tokenize
from support.patience import patient

# Three batches, so that two workers have to keep their order.
TEXTS = [f"def f_{i}(x):\n\treturn x + {i}  # größer 🙂\n" for i in range(3000)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with a.jsonl, and a tokenizer and a pair made from it."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    train = ["--train-tokenizer", "400", "--append-eod", "--workers", "1"]
    assert run(folder, folder / "a.jsonl", "one", *train) == 0
    return folder


def run(corpus: Path, source: Path, prefix: str, *flags: str) -> int:
    return preprocess_data.run(command(corpus, source, prefix, *flags))


def command(corpus: Path, source: Path, prefix: str, *flags: str) -> list[str]:
    named = ["--input", source, "--output-prefix", corpus / prefix]
    return list(map(str, [*named, "--tokenizer-model", corpus / "tokenizer", *flags]))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def dataset(prefix: Path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(str(prefix))


def test_megatron_reads_back_tokenizer_and_documents(corpus):
    args = preprocess_data.parse_args(command(corpus, corpus / "a.jsonl", "one"))
    megatron = load_megatron_tokenizer(args)
    written = dataset(corpus / "one")
    assert (megatron.vocab_size, megatron.eod) == (400, 0)
    assert len(written) == len(written.document_indices) - 1 == len(TEXTS)
    assert written.index.dtype == np.uint16
    for i in (0, 1, 1500, 2999):
        assert written[i].tolist() == [*megatron.encode(TEXTS[i]), megatron.eod]


def test_the_padding_token_is_not_the_end_token(corpus):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = vars(preprocess_data.parse_args(command(corpus, corpus / "a.jsonl", "one")))
    unused = dict(pad_vocab_size=False, chat_template=None, null_tokenizer_pad_id=-1)
    tokenizer = build_tokenizer(argparse.Namespace(**args, **unused))
    assert tokenizer.pad not in (tokenizer.eod, None, -1)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXTS[3])) == TEXTS[3]


def test_only_a_trained_tokenizer_takes_the_short_cut(corpus, tmp_path):
    args = preprocess_data.parse_args(command(corpus, corpus / "a.jsonl", "one"))
    assert load_trained_tokenizer(args).encode(TEXTS[5])
    config = (corpus / "tokenizer" / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config.replace("false", "true"))
    args.tokenizer_model = str(tmp_path)
    assert load_trained_tokenizer(args) is None


def test_the_number_of_workers_changes_nothing(corpus):
    assert run(corpus, corpus / "a.jsonl", "two", "--append-eod", "--workers", "2") == 0
    for suffix in (".bin", ".idx"):
        one, two = ((corpus / f"{name}{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two


def test_a_folder_of_text_files_gives_a_document_a_file(corpus, tmp_path, capsys):
    for name, text in (("a.py", "x = 1\n"), ("b.txt", "not wanted"), ("c.py", "y = 2\n")):
        (tmp_path / name).write_text(text)
    assert run(corpus, tmp_path, "folder", "--glob", "*.py", "--workers", "1") == 0
    assert len(dataset(corpus / "folder")) == 2
    assert "2 documents, " in capsys.readouterr().out


def test_bad_documents_stop_the_run_or_are_skipped_and_counted(corpus, tmp_path, capsys):
    source = tmp_path / "bad.jsonl"
    source.write_bytes(b'{"text": "good"}\n{"t": 1}\n\n\xff\n{"text": "\\ud800"}\n{"text": "too"}\n')
    before = names(corpus)
    assert run(corpus, source, "bad", "--workers", "1") == 2
    error = capsys.readouterr().err
    assert f"{source}:2: no key 'text'" in error and "--on-error skip" in error
    assert names(corpus) == before

    assert run(corpus, source, "bad", "--workers", "1", "--on-error", "skip") == 0
    out, error = capsys.readouterr()
    assert len(dataset(corpus / "bad")) == 2
    assert "Skipped 4: " in out
    for place in (":2: no key", ":3: empty", ":4: not UTF-8", ":5: the tokenizer refused it"):
        assert f"skipped {source}{place}" in error


def test_training_a_tokenizer_stops_at_a_bad_document(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    flags = ["--train-tokenizer", "300", "--workers", "1"]
    assert run(tmp_path, tmp_path / "empty.txt", "out", *flags) == 2
    assert "empty.txt: empty" in capsys.readouterr().err
    assert names(tmp_path) == {"empty.txt"}


def test_nothing_left_is_an_error_and_writes_nothing(corpus, tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    before = names(corpus)
    flags = ["--on-error", "skip", "--workers", "1"]
    assert run(corpus, tmp_path / "empty.txt", "none", *flags) == 2
    assert "None of the 1 document(s) can be used" in capsys.readouterr().err
    assert names(corpus) == before


def test_existing_results_are_replaced_only_on_request(corpus, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    assert run(corpus, tmp_path / "a.txt", "again", "--workers", "1") == 0
    before = (corpus / "again.bin").read_bytes()
    (tmp_path / "a.txt").write_text("hello, world")
    assert run(corpus, tmp_path / "a.txt", "again", "--workers", "1") == 2
    assert "again.bin exists" in capsys.readouterr().err
    assert run(corpus, tmp_path / "a.txt", "new", "--train-tokenizer", "300") == 2
    assert "tokenizer.json exists" in capsys.readouterr().err
    assert (corpus / "again.bin").read_bytes() == before
    assert run(corpus, tmp_path / "a.txt", "again", "--workers", "1", "--overwrite") == 0
    assert len((corpus / "again.bin").read_bytes()) > len(before)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--train-tokenizer", "257"], "too small"),
        (["--train-tokenizer", "300", "--tokenizer-type", "TikTokenizer"], "--tokenizer-model DIR"),
        (["--tokenizer-type", "NullTokenizer"], "needs --vocab-size"),
        (["--workers", "0"], "--workers 0"),
        (["--input", "nowhere.txt"], "--input nowhere.txt does not exist"),
    ],
)
def test_wrong_flags_are_refused_with_one_sentence(tmp_path, capsys, flags, sentence):
    assert run(tmp_path, tmp_path, "out", *flags) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert names(tmp_path) == set()


def test_a_tokenizer_of_megatrons_own(corpus):
    """Through Megatron's builder; an id outside the vocabulary is the document's fault."""
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod"]
    args = preprocess_data.parse_args(command(corpus, corpus, "null", *flags))
    batch = [Record("a.txt", 0, b"1 2 99"), Record("b.txt", 0, b"100"), Record("c.txt", 0, b"x")]
    result = tokenize(batch, load_tokenizer(args), np.uint16, args)
    assert (result.lengths, result.ids.tolist()) == ([4], [1, 2, 99, 99])
    assert [place for place, _ in result.problems] == ["b.txt", "c.txt"]
    assert "outside the vocabulary of 100" in result.problems[0][1]


def test_a_worker_that_dies_ends_the_run(corpus):
    args = preprocess_data.parse_args(command(corpus, corpus, "one", "--workers", "1"))
    with started_workers(load_tokenizer(args), np.uint16, args) as (worker,):
        worker.process.kill()
        worker.process.join()
        with pytest.raises(Refused, match="A worker died"):
            list(results([[]], [worker]))


def test_workers_end_with_their_parent(corpus):
    """Whose end of a pipe no sibling keeps open."""
    args = preprocess_data.parse_args(command(corpus, corpus, "one", "--workers", "2"))
    with started_workers(load_tokenizer(args), np.uint16, args) as workers:
        for worker in workers:
            worker.pipe.close()
            worker.process.join(timeout=patient(20))
            assert worker.process.exitcode == 0


def test_no_more_batches_are_read_than_there_are_workers():
    class Echo:
        def send(self, batch):
            self.batch = batch

        def receive(self):
            return self.batch[0]

    read = []
    stream = results((read.append(i) or i for i in range(10)), [Echo(), Echo()])
    assert next(stream) == 0 and read == [0, 1, 2]
    assert list(stream) == list(range(1, 10))


def test_several_keys_make_a_pair_each_under_upstreams_names(corpus, tmp_path, capsys):
    source = tmp_path / "two.jsonl"
    rows = [{"title": f"f {i}", "text": text} for i, text in enumerate(TEXTS[:5])]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["--workers", "1", "--append-eod", "--json-keys", "text", "title"]
    assert run(corpus, source, "two", *keys) == 0
    assert run(corpus, source, "named", "--workers", "1", "--append-eod", "--upstream-names") == 0
    assert run(corpus, source, "plain", "--workers", "1", "--append-eod") == 0
    assert len(dataset(corpus / "two_title_document")) == len(dataset(corpus / "two_text_document")) == 5
    assert f"--data-path {corpus / 'two_title_document'}" in capsys.readouterr().out
    for suffix in (".bin", ".idx"):
        named, of_two, plain = (
            (corpus / f"{name}{suffix}").read_bytes() for name in ("named_text_document", "two_text_document", "plain")
        )
        assert named == of_two == plain
    assert run(corpus, source, "twice", "--json-keys", "text", "text") == 2


def test_the_first_documents_alone(corpus):
    assert run(corpus, corpus / "a.jsonl", "few", "--workers", "1", "--append-eod", "--max-documents", "7") == 0
    few, all_of_them = dataset(corpus / "few"), dataset(corpus / "one")
    assert len(few) == 7 and few[6].tolist() == all_of_them[6].tolist()
    assert run(corpus, corpus / "a.jsonl", "none", "--max-documents", "0") == 2


def test_partitions_outlive_a_kill_and_the_pair_is_the_same(corpus, monkeypatch, capsys):
    flags = ["--append-eod", "--workers", "1", "--partitions", "3"]
    finish, finished = Partitions.finish, []

    def finish_or_die(self, number, counts):
        if finished == [0]:
            raise KeyboardInterrupt
        finish(self, number, counts)
        finished.append(number)

    monkeypatch.setattr(Partitions, "finish", finish_or_die)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, corpus / "a.jsonl", "parts", *flags)
    assert not (corpus / "parts.bin").exists() and (corpus / ".parts-parts").is_dir()
    monkeypatch.setattr(
        Partitions, "finish", lambda self, number, counts: finished.append(number) or finish(self, number, counts)
    )
    assert run(corpus, corpus / "a.jsonl", "parts", *flags) == 0
    assert finished == [0, 1, 2], "the first is not made again"
    out = capsys.readouterr().out
    assert "1 partition(s) of an earlier run are done." in out and f"{len(TEXTS):,} documents, " in out
    assert not (corpus / ".parts-parts").exists()
    for suffix in (".bin", ".idx"):
        assert (corpus / f"parts{suffix}").read_bytes() == (corpus / f"one{suffix}").read_bytes()


def test_partitions_made_otherwise_are_made_again(corpus, monkeypatch):
    def die(self, builder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Partitions, "merge_into", die)
        run(corpus, corpus / "a.jsonl", "other", "--workers", "1", "--partitions", "2")
    assert run(corpus, corpus / "a.jsonl", "other", "--workers", "1", "--partitions", "2", "--append-eod") == 0
    assert (corpus / "other.bin").read_bytes() == (corpus / "one.bin").read_bytes()


def test_without_a_terminal_lines_show_the_progress(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.Progress(4_000_000) as shown:
        shown.update(1_000_000, progress.Counts(10, 500))
    line = capsys.readouterr().err
    assert line.startswith(" 25%: 10 documents, ") and "500 tokens, " in line and line.endswith(" MB/s\n")


def test_a_batch_is_tokenized_as_its_documents_are(corpus):
    args = preprocess_data.parse_args(command(corpus, corpus / "a.jsonl", "one"))
    tokenizer = load_trained_tokenizer(args)
    assert tokenizer.encode_batch(TEXTS[:50]) == [tokenizer.encode(text) for text in TEXTS[:50]]


def test_any_fast_tokenizer_takes_a_batch_as_its_documents(corpus):
    """Megatron's own calls, text by text, are what upstream's tool makes; end tokens in a text count as such."""
    tokenizer = load_megatron_tokenizer(preprocess_data.parse_args(command(corpus, corpus / "a.jsonl", "one")))
    texts = [*TEXTS[:50], "a<|endoftext|>b", " leading", "\u0301 é ", "\n\n", ""]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("special", [True, False])
def test_a_batch_is_neither_cut_nor_padded(corpus, tmp_path, special):
    from tokenizers import Tokenizer as Rust
    from tokenizers.processors import TemplateProcessing

    rust = Rust.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    rust.enable_truncation(5)
    rust.enable_padding(length=8)
    rust.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    rust.save(str(tmp_path / "tokenizer.json"))
    config = (corpus / "tokenizer" / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config.replace("false", "true"))
    flags = [] if special else ["--tokenizer-hf-no-include-special-tokens"]
    args = preprocess_data.parse_args(command(tmp_path, tmp_path, "out", "--tokenizer-model", str(tmp_path), *flags))
    tokenizer = load_megatron_tokenizer(args)
    batch = tokenizer.encode_batch(TEXTS[:3])
    assert batch == [tokenizer.encode(text) for text in TEXTS[:3]]
    assert all(len(ids) > 8 and (ids[0] == 0) == special for ids in batch)


def test_a_tokenizer_with_a_way_of_its_own_keeps_it(corpus):
    from transformers import PreTrainedTokenizerFast

    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **kwargs):
            return super()._encode_plus(text.lower(), **kwargs)

    def call_of(kind):
        inner = kind(tokenizer_file=str(corpus / "tokenizer" / "tokenizer.json"))
        return batch_call(SimpleNamespace(_tokenizer=SimpleNamespace(tokenizer=inner, include_special_tokens=True)))

    assert call_of(PreTrainedTokenizerFast)(TEXTS[:1])
    assert call_of(Own) is None


def test_a_signal_leaves_nothing_behind(corpus):
    """Both runs wait in the middle of a stream: what they wrote so far goes, they end at once."""
    tool = Path(__file__).parents[3] / "tools" / "preprocess_data.py"
    runs = []
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = corpus / number.name
        folder.mkdir()
        os.mkfifo(folder / "pipe.jsonl")
        flags = ["--output-prefix", str(folder / "out"), "--workers", "1"]
        argv = command(corpus, folder / "pipe.jsonl", "out", *flags)
        process = subprocess.Popen([sys.executable, str(tool), *argv], start_new_session=True, stderr=subprocess.PIPE)
        runs.append((number, folder, process))
    try:
        for number, folder, process in runs:
            with open(folder / "pipe.jsonl", "w") as pipe:
                pipe.write('{"text": "hello"}\n' * 5000)
                pipe.flush()
                until = time.monotonic() + 60
                while not list(folder.glob(".out-*/bin")):
                    assert time.monotonic() < until and process.poll() is None
                    time.sleep(0.05)
                os.killpg(process.pid, number)  # as a terminal does: the workers get it too
                error = process.communicate(timeout=patient(20))[1].decode()
            assert process.returncode == 128 + number
            assert f"stopped by {number.name}" in error and "Traceback" not in error
            assert names(folder) == {"pipe.jsonl"}
    finally:
        for _, _, process in runs:
            if process.poll() is None:
                process.kill()
