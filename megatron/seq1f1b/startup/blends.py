"""The data sets that the flags name, with the weights of a blend and the shares of --split."""

import json
import math
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

_SPLITS = ("train", "valid", "test")


def data_prefixes(args: Namespace) -> Iterator[tuple[str, str]]:
    """(flag, prefix) of every `.bin`/`.idx` pair on a file system; raises ValueError where a flag names no data.

    Left out are weights of a blend, object storage, and names that exist by themselves: conversations as JSON lines
    (--sft), folders of a script's own data sets.
    """
    for flag, words in _blends(args):
        for prefix in _prefixes(flag, words):
            if "://" not in prefix and not _is_of_another_kind(Path(prefix)):
                yield flag, prefix


def check_split(args: Namespace) -> None:
    """Raise ValueError for a --split that is not up to three shares, or leaves nothing for training."""
    split = getattr(args, "split", None)
    if split is None:
        return
    try:
        shares = [float(share) for share in re.split("[,/]", split)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(_SPLITS) or not all(math.isfinite(share) and share >= 0 for share in shares):
        raise ValueError(f"--split {split} must hold the shares of training, validation and test, such as 969,30,1")
    if shares[0] == 0 and args.train_iters and not args.skip_train:
        raise ValueError(f"--split {split} leaves no data for training; give its first share more than 0")


def _blends(args: Namespace) -> Iterator[tuple[str, Sequence[str]]]:
    """(flag, words) of every flag and every file of words that names data."""
    for name in ("data_path", *(f"{split}_data_path" for split in _SPLITS)):
        words = getattr(args, name, None)
        if words is not None:
            yield f"--{name.replace('_', '-')}", [words] if isinstance(words, str) else words
    path = getattr(args, "data_args_path", None)
    if path is not None and "://" not in path:
        yield f"--data-args-path {path}", _text("--data-args-path", path).split()
    path = getattr(args, "per_split_data_args_path", None)
    if path is not None and "://" not in path:
        yield from _blends_of_splits(path)


def _blends_of_splits(path: str) -> Iterator[tuple[str, Sequence[str]]]:
    flag = "--per-split-data-args-path"
    try:
        splits = json.loads(_text(flag, path))
        blends = [splits[split] for split in _SPLITS]
    except (json.JSONDecodeError, KeyError, TypeError, IndexError):
        raise ValueError(
            f'{flag} {path} must hold JSON such as {{"train": [...], "valid": [...], "test": [...]}}'
        ) from None
    for split, words in zip(_SPLITS, blends, strict=True):
        words = words.split() if isinstance(words, str) else words
        if words is None:
            continue
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{flag} {path}: '{split}' must hold a list of names, or pairs of weight and name")
        yield f"{flag} {path}", words


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ValueError(f"{flag} {path} cannot be read ({reason})") from None


def _prefixes(flag: str, words: Sequence[str]) -> Sequence[str]:
    """The names in `weight name weight name ...` or `name name ...`, distinguished as Megatron does."""
    if not any(words):
        raise ValueError(f"{flag} names no data; give the names of .bin/.idx pairs, without these endings")
    weights = [_number(word) for word in words[::2]]
    if len(words) % 2 == 1 or None in weights:
        if any(_number(word) is not None and not Path(f"{word}.idx").exists() for word in words):
            raise ValueError(f"{flag} {' '.join(words)} must be names, or pairs of weight and name throughout")
        return words
    if not all(weight is not None and math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError(f"{flag} {' '.join(words)}: weights must be finite, not negative, and not all 0")
    return words[1::2]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _is_of_another_kind(path: Path) -> bool:
    return path.exists() and path.suffix not in (".bin", ".idx") and not Path(f"{path}.idx").exists()
