"""Train a tokenizer, or load one."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from .documents import BadDocument, parse, read_records, refusal
from .durable import move
from .stopping import Refused, signals_held

EOD, PAD = "<|endoftext|>", "<|padding|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, and the two special tokens
TOKENIZER_CONFIG = f"""{{
  "tokenizer_class": "PreTrainedTokenizerFast",
  "eos_token": "{EOD}",
  "pad_token": "{PAD}",
  "clean_up_tokenization_spaces": false,
  "model_max_length": {1 << 62}
}}
"""

_CALLS = "__call__", "_encode_plus", "_batch_encode_plus"  # by which transformers, 4 or 5, goes from a text to ids


BatchCall = Callable[[list[str]], list[list[int]]]


class Tokenizer(NamedTuple):
    """`encode_batch`, where there is one, returns ids within the vocabulary only."""

    encode: Callable[[str], list[int]]
    vocab_size: int
    eod: int | None
    encode_batch: BatchCall | None = None


def train_tokenizer(args: argparse.Namespace, files: list[str]) -> None:
    """Train a byte-level BPE on all documents; save what a HuggingFaceTokenizer is read from."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Rust

    def texts() -> Iterator[str]:
        for record in islice(read_records(files, args.input_format), args.max_documents):
            for key in args.json_keys:
                try:
                    yield parse(record, args.input_format, key)
                except BadDocument as bad:  # skipped ones are reported when they are tokenized
                    if args.on_error == "stop":
                        raise refusal(record.place, str(bad)) from None

    tokenizer = Rust(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.train_tokenizer,
        special_tokens=[AddedToken(EOD, special=True), AddedToken(PAD, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)

    folder = Path(args.tokenizer_model)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as new:
        tokenizer.save(f"{new}/tokenizer.json")
        Path(new, "tokenizer_config.json").write_text(TOKENIZER_CONFIG)
        with signals_held():
            for name in ("tokenizer_config.json", "tokenizer.json"):
                move(Path(new, name), folder / name)
    print(f"Tokenizer of {tokenizer.get_vocab_size()} tokens saved in {folder}.", flush=True)


def load_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that the flags name, with all that they ask of it; otherwise raises Refused."""
    try:
        tokenizer = load_trained_tokenizer(args) or load_megatron_tokenizer(args)
    except Exception as error:  # whatever the libraries raise
        raise Refused(
            f"Cannot load the {args.tokenizer_type} (--tokenizer-model, --vocab-file, ...): "
            f"{type(error).__name__}: {error}"
        ) from None
    if args.append_eod and tokenizer.eod not in range(tokenizer.vocab_size):
        raise Refused(
            f"The {args.tokenizer_type} has no end token in its vocabulary: take another tokenizer, or leave out "
            "--append-eod."
        )
    return tokenizer


def load_trained_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """A tokenizer that was trained here, loaded without the time and the memory that importing Megatron takes.

    None for any other, which is left to transformers.
    """
    if args.tokenizer_type != "HuggingFaceTokenizer" or args.vocab_file or args.special_tokens:
        return None
    folder = Path(args.tokenizer_model)
    try:
        if (folder / "tokenizer_config.json").read_text("utf-8") != TOKENIZER_CONFIG:
            return None
    except OSError:
        return None
    from tokenizers import Tokenizer as Rust

    rust = Rust.from_file(str(folder / "tokenizer.json"))
    encode_batch = _in_batches(rust, add_special_tokens=True)
    return Tokenizer(lambda text: rust.encode(text).ids, rust.get_vocab_size(), rust.token_to_id(EOD), encode_batch)


def load_megatron_tokenizer(args: argparse.Namespace) -> Tokenizer:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    # What build_tokenizer reads and preprocessing has no use for.
    unused = dict(pad_vocab_size=False, chat_template=None, null_tokenizer_pad_id=-1)
    megatron = build_tokenizer(argparse.Namespace(**vars(args), **unused))
    try:
        eod = megatron.eod
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        eod = None  # some libraries raise where they have no such token
    return Tokenizer(megatron.tokenize, megatron.vocab_size, eod, batch_call(megatron))


def batch_call(megatron: Any) -> BatchCall | None:
    """What returns the ids of many texts in one call, as a fast tokenizer of Hugging Face can; None for any other."""
    library = getattr(megatron, "_tokenizer", None)
    tokenizer = getattr(library, "tokenizer", None)
    if not (hasattr(library, "include_special_tokens") and getattr(tokenizer, "is_fast", False)):
        return None
    from transformers import PreTrainedTokenizerFast

    # Some classes change texts or ids in Python: theirs is the only way.
    if any(getattr(type(tokenizer), name, None) is not getattr(PreTrainedTokenizerFast, name, None) for name in _CALLS):
        return None
    tokenizer("")  # leaves its Rust tokenizer without truncation and padding, and with its rule for special tokens
    return _in_batches(tokenizer.backend_tokenizer, library.include_special_tokens)


def _in_batches(rust: Any, add_special_tokens: bool) -> BatchCall | None:
    vocabulary = rust.get_vocab()
    if max(vocabulary.values()) >= len(vocabulary):
        return None  # there are gaps, and the ids of each text have to be looked at

    def encode_batch(texts: list[str]) -> list[list[int]]:
        """Without positions in the text, of which training has no use."""
        return [encoding.ids for encoding in rust.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    return encode_batch
