"""Data, tokenizers and folders that a run names are looked at before it starts: each fault has its sentence."""

import shutil
import struct
from argparse import Namespace
from collections import namedtuple
from pathlib import Path

import pytest

from megatron.seq1f1b.planning.costs import ModelShape
from megatron.seq1f1b.startup import places
from megatron.seq1f1b.startup.blends import check_split, data_prefixes
from megatron.seq1f1b.startup.data_files import check_data
from megatron.seq1f1b.startup.places import Place, check_space, check_writable
from megatron.seq1f1b.startup.tokenizer import check_tokenizer

MAGIC = b"MMIDIDX\x00\x00"


def write_pair(prefix: Path, lengths=(3, 5), token=8, version=1, starts=None, documents=None) -> None:
    """As Megatron writes it: 16-bit tokens, a document for each sequence."""
    size = 2 if token == 8 else 4
    starts = starts or [size * sum(lengths[:i]) for i in range(len(lengths))]
    documents = documents or range(len(lengths) + 1)
    prefix.with_suffix(".idx").write_bytes(
        MAGIC
        + struct.pack("<QBQQ", version, token, len(lengths), len(lengths) + 1)
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *starts)
        + struct.pack(f"<{len(lengths) + 1}q", *documents)
    )
    prefix.with_suffix(".bin").write_bytes(bytes(size * sum(lengths)))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


BAD_DATA = {
    "no pair": (lambda p: p.with_suffix(".idx").unlink(), "there is no file"),
    "no data": (lambda p: p.with_suffix(".bin").unlink(), "there is no file"),
    "a folder for an index": (lambda p: (p.with_suffix(".idx").unlink(), p.with_suffix(".idx").mkdir()), "no file"),
    "empty index": (lambda p: cut(p.with_suffix(".idx"), 0), "is not an index of Megatron's"),
    "text for an index": (lambda p: p.with_suffix(".idx").write_text("text " * 99), "is not an index of Megatron's"),
    "header cut short": (lambda p: cut(p.with_suffix(".idx"), 20), "is cut short"),
    "index cut short": (lambda p: cut(p.with_suffix(".idx"), 60), "has 60 bytes, but its 2 sequences"),
    "other version": (lambda p: write_pair(p, version=2), "has version 2"),
    "other token type": (lambda p: write_pair(p, token=77), "token type 77"),
    "no documents": (lambda p: write_pair(p, ()), "holds no documents"),
    "negative lengths": (lambda p: write_pair(p, (-3, 11)), "do not follow one another"),
    "negative positions": (lambda p: write_pair(p, starts=(-100, 6)), "do not follow one another"),
    "a gap": (lambda p: write_pair(p, (3, 4), starts=(0, 8)), "do not follow one another"),
    "documents beyond": (lambda p: write_pair(p, documents=(0, 7, 2)), "do not follow one another"),
    "documents end early": (lambda p: write_pair(p, documents=(0, 1, 1)), "do not follow one another"),
    "data cut short": (lambda p: cut(p.with_suffix(".bin"), 10), "has 10 bytes, but its index stands for 16"),
    "data too long": (lambda p: p.with_suffix(".bin").write_bytes(bytes(99)), "has 99 bytes, but its index stands for"),
}


@pytest.mark.parametrize("spoil, sentence", BAD_DATA.values(), ids=BAD_DATA)
def test_bad_data(tmp_path, spoil, sentence):
    write_pair(tmp_path / "data")
    check_data("--data-path", str(tmp_path / "data"))
    spoil(tmp_path / "data")
    with pytest.raises(ValueError, match=sentence) as error:
        check_data("--data-path", str(tmp_path / "data"))
    assert str(error.value).startswith(f"--data-path {tmp_path}/data: ")


def test_the_name_of_a_file_is_not_the_name_of_a_pair(tmp_path):
    write_pair(tmp_path / "data")
    with pytest.raises(ValueError, match="give the name without .bin"):
        check_data("--data-path", str(tmp_path / "data.bin"))


def test_conversations_and_folders_are_no_pairs(tmp_path):
    (tmp_path / "chats.jsonl").write_text("{}")
    write_pair(tmp_path / "text")
    (tmp_path / "text").mkdir()
    names = [str(tmp_path), str(tmp_path / "chats.jsonl"), str(tmp_path / "text")]
    assert list(data_prefixes(Namespace(data_path=names))) == [("--data-path", str(tmp_path / "text"))]
    missing = str(tmp_path / "missing.jsonl")
    assert list(data_prefixes(Namespace(data_path=[missing]))) == [("--data-path", missing)]
    with pytest.raises(ValueError, match="missing.jsonl: there is no such file"):
        check_data("--data-path", missing)


def test_weights_and_object_storage_are_not_files():
    args = Namespace(data_path=["0.3", "a", "0.7", "s3://b"], train_data_path=["c"])
    assert list(data_prefixes(args)) == [("--data-path", "a"), ("--train-data-path", "c")]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ({"data_path": []}, "--data-path names no data"),
        ({"valid_data_path": [""]}, "--valid-data-path names no data"),
        ({"data_path": ["0.5", "a", "0.5"]}, "must be names, or pairs of weight and name throughout"),
        ({"data_path": ["a", "1"]}, "must be names, or pairs of weight and name throughout"),
        ({"data_path": ["0", "a", "0", "b"]}, "weights must be finite, not negative, and not all 0"),
        ({"data_path": ["-1", "a", "2", "b"]}, "weights must be finite, not negative, and not all 0"),
        ({"data_path": ["nan", "a", "2", "b"]}, "weights must be finite, not negative, and not all 0"),
        ({"data_args_path": "/none"}, "--data-args-path /none cannot be read [(]No such file"),
        ({"data_args_path": "{}/binary"}, "--data-args-path .*/binary cannot be read [(]no UTF-8 text"),
        ({"data_args_path": "{}/empty"}, "--data-args-path .*/empty names no data"),
        ({"per_split_data_args_path": "{}/words"}, "--per-split-data-args-path .*/words must hold JSON such as"),
        ({"per_split_data_args_path": "{}/list.json"}, "--per-split-data-args-path .*/list.json must hold JSON such"),
        ({"per_split_data_args_path": "{}/numbers.json"}, "numbers.json: 'train' must hold a list of names"),
    ],
    ids=str,
)
def test_bad_blends(tmp_path, flags, sentence):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for name, text in (
        ("empty", ""),
        ("words", "many small words"),
        ("list.json", "[1, 2]"),
        ("numbers.json", '{"train": [1], "valid": null, "test": null}'),
    ):
        (tmp_path / name).write_text(text)
    given = {
        name: value.replace("{}", str(tmp_path)) if isinstance(value, str) else value for name, value in flags.items()
    }
    with pytest.raises(ValueError, match=sentence):
        list(data_prefixes(Namespace(**given)))


def test_blends_in_files_are_looked_at(tmp_path):
    (tmp_path / "words").write_text("0.3 a 0.7 b")
    (tmp_path / "splits.json").write_text('{"train": "1 c 2 d", "valid": ["e"], "test": null}')
    args = Namespace(data_args_path=f"{tmp_path}/words", per_split_data_args_path=f"{tmp_path}/splits.json")
    assert [prefix for _, prefix in data_prefixes(args)] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("split", ["a,b,c", "", ",,", "1,2,3,4", "nan,1,1", "9,-1,2", "0,0,0", "0,1,0"])
def test_bad_splits(split):
    with pytest.raises(ValueError, match=f"^--split {split} (must hold the shares|leaves no data for training)"):
        check_split(Namespace(split=split, train_iters=3, skip_train=False))


@pytest.mark.parametrize("split", [None, "969, 30, 1", "1", "9.5/0.5", "100,0,0"])
def test_good_splits(split):
    check_split(Namespace(split=split, train_iters=3, skip_train=False))


def test_an_evaluation_needs_no_share_of_training():
    check_split(Namespace(split="0,0,1", train_iters=0, skip_train=False))
    check_split(Namespace(split="0,0,1", train_iters=9, skip_train=True))


@pytest.mark.parametrize(
    "files, sentence",
    [
        ({}, "holds no tokenizer, such as tokenizer.json or tokenizer.model"),
        ({"tokenizer.json": '{"version": "1.0", "model"'}, "tokenizer.json is broken"),
        ({"tokenizer.json": "[]"}, "tokenizer.json is broken"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, "tokenizer_config.json is broken"),
    ],
    ids=str,
)
def test_broken_folders_of_a_tokenizer(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    kind = {"tokenizer_type": "HuggingFaceTokenizer", "vocab_file": None, "merge_file": None}
    with pytest.raises(ValueError, match=f"--tokenizer-model {tmp_path}.* {sentence}|--tokenizer-model .*/{sentence}"):
        check_tokenizer(Namespace(**kind, tokenizer_model=str(tmp_path)))


def test_a_vocabulary_that_is_no_json(tmp_path):
    (tmp_path / "vocab.json").write_bytes(b"\xff\xfe")
    args = {"tokenizer_type": "GPT2BPETokenizer", "tokenizer_model": None, "merge_file": None}
    with pytest.raises(ValueError, match="--vocab-file .*vocab.json is broken"):
        check_tokenizer(Namespace(**args, vocab_file=str(tmp_path / "vocab.json")))


@pytest.mark.parametrize(
    "kind, model, sentence",
    [
        ("HuggingFaceTokenizer", None, "needs --tokenizer-model"),
        ("HuggingFaceTokenizer", "/no/folder", "--tokenizer-model /no/folder does not exist"),
        ("HuggingFaceTokenizer", "./no/folder", "--tokenizer-model ./no/folder does not exist"),
        ("SentencePieceTokenizer", "no.model", "--tokenizer-model no.model does not exist"),
    ],
)
def test_bad_tokenizers(kind, model, sentence):
    args = Namespace(tokenizer_type=kind, tokenizer_model=model, vocab_file=None, merge_file=None)
    with pytest.raises(ValueError, match=sentence):
        check_tokenizer(args)


def test_names_on_a_hub_are_not_files():
    for kind, model in (("HuggingFaceTokenizer", "owner/model"), ("NullTokenizer", None)):
        check_tokenizer(Namespace(tokenizer_type=kind, tokenizer_model=model, vocab_file=None, merge_file=None))
    with pytest.raises(ValueError, match="--vocab-file none.json does not exist"):
        check_tokenizer(
            Namespace(tokenizer_type="GPT2BPETokenizer", tokenizer_model=None, vocab_file="none.json", merge_file=None)
        )


@pytest.mark.parametrize("flag", ["--save", "--pipeline-trace", "--tensorboard-dir", "--data-cache-path"])
def test_what_cannot_be_written(tmp_path, flag):
    check_writable(Place(flag, tmp_path / "new" / "folder"))
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(ValueError, match=f"{flag} {path} cannot be written"):
            check_writable(Place(flag, path))


def test_each_place_is_looked_at_on_the_ranks_that_write_there():
    args = Namespace(save="s", pipeline_trace=Path("t"), data_cache_path="c", tensorboard_dir="b")

    def flags(rank, local_rank):
        return {place.flag for place in places.places(args, rank, local_rank, world_size=4)}

    assert flags(0, 0) == {"--save", "--pipeline-trace", "--data-cache-path"}
    assert flags(1, 1) == set()
    assert flags(2, 0) == {"--save", "--pipeline-trace"}
    assert flags(3, 1) == {"--tensorboard-dir"}


def test_a_run_needs_space_for_two_checkpoints_or_the_only_one(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 75, 25 * 2**30))
    place = Place("--save", tmp_path)
    check_space(place, 12 * 2**30, num_checkpoints=9)
    check_space(place, 25 * 2**30, num_checkpoints=1)
    with pytest.raises(ValueError, match=r"25.0 GiB free on /.*, but two checkpoints take about 26.0 GiB; make space"):
        check_space(place, 13 * 2**30, num_checkpoints=2)


def test_a_checkpoint_has_the_size_of_weights_and_optimizer():
    model = ModelShape(32, 4096, 16384, 32, 128, 32768)
    parameters = places.num_parameters(model)
    assert parameters == pytest.approx(6_712_598_528, rel=2e-3)  # the 7b of the authors
    args = Namespace(bf16=True, fp16=False, optimizer="adam", no_save_optim=None)
    assert places.checkpoint_bytes(args, parameters) == 14 * parameters
    args = Namespace(bf16=False, fp16=False, optimizer="adam", no_save_optim=True)
    assert places.checkpoint_bytes(args, parameters) == 4 * parameters
    assert places.num_checkpoints(Namespace(train_iters=10, save_interval=4)) == 3
    assert places.num_checkpoints(Namespace(train_iters=10, save_interval=None)) == 1
