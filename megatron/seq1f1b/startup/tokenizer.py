"""Whether the files of a tokenizer are there."""

from argparse import Namespace
from pathlib import Path

# Kinds that are read from --tokenizer-model; some of them take names of Hugging Face's hub, too.
_FROM_A_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
_FROM_A_HUB = ("HuggingFaceTokenizer", "SFTTokenizer")


def check_tokenizer(args: Namespace) -> None:
    """Raise ValueError for a tokenizer without the flags or the files that it is read from."""
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind in _FROM_A_FILE + _FROM_A_HUB and not model:
        raise ValueError(f"--tokenizer-type {kind} needs --tokenizer-model")
    files = [("--vocab-file", args.vocab_file), ("--merge-file", args.merge_file)]
    if kind in _FROM_A_FILE or kind in _FROM_A_HUB and not _is_name_on_hub(model):
        files.append(("--tokenizer-model", model))
    for flag, path in files:
        if path and not Path(path).exists():
            raise ValueError(f"{flag} {path} does not exist; give the tokenizer that made the data")


def _is_name_on_hub(model: str) -> bool:
    """They look like `model` or `owner/model`."""
    return not model.startswith((".", "/", "~")) and model.count("/") < 2
