"""Whether the files of a tokenizer are there, and hold one."""

import json
from argparse import Namespace
from pathlib import Path

# Kinds that are read from --tokenizer-model; some of them take names of Hugging Face's hub, too.
_FROM_A_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
_FROM_A_HUB = ("HuggingFaceTokenizer", "SFTTokenizer")
_HELD_BY_A_FOLDER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def check_tokenizer(args: Namespace) -> None:
    """Raise ValueError for a tokenizer without the flags or the files that it is read from, or whose JSON is broken."""
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind in _FROM_A_FILE + _FROM_A_HUB and not model:
        raise ValueError(f"--tokenizer-type {kind} needs --tokenizer-model")
    files = [("--vocab-file", args.vocab_file), ("--merge-file", args.merge_file)]
    if kind in _FROM_A_FILE or kind in _FROM_A_HUB and not _is_name_on_hub(model):
        files.append(("--tokenizer-model", model))
    for flag, path in files:
        if path and not Path(path).exists():
            raise ValueError(f"{flag} {path} does not exist; give the tokenizer that made the data")
    if kind in _FROM_A_HUB and Path(model).is_dir():
        _check_folder(Path(model))
    if args.vocab_file and Path(args.vocab_file).suffix == ".json":
        _check_json("--vocab-file", Path(args.vocab_file))


def _check_folder(folder: Path) -> None:
    """A folder that Hugging Face's `save_pretrained` wrote."""
    if not any((folder / name).is_file() for name in _HELD_BY_A_FOLDER):
        raise ValueError(f"--tokenizer-model {folder} holds no tokenizer, such as {' or '.join(_HELD_BY_A_FOLDER[:2])}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _check_json("--tokenizer-model", folder / name)


def _check_json(flag: str, path: Path) -> None:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read ({error.strerror})") from None
    except ValueError:  # no UTF-8, or no JSON
        held = None
    if not isinstance(held, dict):
        raise ValueError(f"{flag} {path} is broken, or not the JSON of a tokenizer; get it again")


def _is_name_on_hub(model: str) -> bool:
    """They look like `model` or `owner/model`."""
    return not model.startswith((".", "/", "~")) and model.count("/") < 2
