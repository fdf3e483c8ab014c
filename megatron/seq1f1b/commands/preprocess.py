"""Turn text into the PREFIX.bin / PREFIX.idx pair that Megatron trains on.

In: JSON-lines files (one document a line), plain text files (one document a file), folders of either. Out: one pair, to
be named in training as --data-path PREFIX. The tokenizer is any of Megatron's, chosen by Megatron's own flags, or a
byte-level BPE trained here on the same input:

    seq1f1b preprocess --input corpus.jsonl --output-prefix data/corpus \\
        --train-tokenizer 32000 --tokenizer-model data/tokenizer --append-eod

The files get their names together, when all are complete.
"""

import argparse
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from ..arguments.checks import check_no_pipes
from ..arguments.flags import number_type
from ..files.writing import written_together
from .corpus_documents import JSON_SUFFIXES, WAY_OUT, documents, find_files, texts
from .document_encoder import Encoder
from .encoding_workers import encoded
from .parsing import Parser
from .trained_tokenizer import CONFIG, FEWEST_TOKENS, TOKENIZER, train_tokenizer

_MOST_TOKENS = 10_000_000  # of a vocabulary
_USUAL_TOKENIZER = "HuggingFaceTokenizer"


def make_parser() -> Parser:
    parser = Parser(__doc__, epilog="All other flags go to Megatron's tokenizers: --tokenizer-type, --vocab-file, ...")
    add = parser.add_argument
    of_lines = f"{' '.join(JSON_SUFFIXES)} (also .jsonl.txt)"
    paths = f"files, or folders of any depth; a document a line of {of_lines}, else a document a file"
    add("--input", nargs="+", required=True, metavar="PATH", help=paths)
    add("--glob", default="*", metavar="PATTERN", help="names of files to take from a folder: '*.py'")
    add("--json-key", "--json-keys", default="text", metavar="KEY", help="of the text; default: text")
    errors = "at a document that is empty, not UTF-8, bad JSON or without the key: stop (default), or skip it"
    add("--on-error", choices=("stop", "skip"), default="stop", help=errors)
    add("--output-prefix", required=True, metavar="PREFIX", help="training's --data-path")
    add("--append-eod", action="store_true", help="end every document with the tokenizer's end token")
    add("--overwrite", action="store_true", help="replace an existing pair (and, with --train-tokenizer, tokenizer)")
    parser.add_workers("tokenize")
    train = "first train a byte-level BPE of this size on the input and save it in the folder --tokenizer-model"
    problem = f"not from {FEWEST_TOKENS}, which bytes make, to {_MOST_TOKENS:,}"
    size = number_type(int, lambda size: FEWEST_TOKENS <= size <= _MOST_TOKENS, problem)
    add("--train-tokenizer", type=size, metavar="VOCAB_SIZE", help=train)
    return parser


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Our own flags, with those of Megatron's tokenizers; the `files` of the input, and the `pair` to be written. What
    is wrong with the former shows before Megatron is imported, which takes seconds."""
    own = make_parser()
    args, of_tokenizer = own.parse_known_args(argv)
    args.pair = [Path(f"{args.output_prefix}{ending}") for ending in (".bin", ".idx")]
    check_flags(named_tokenizer(args, of_tokenizer))
    args.files = find_files(args.input, args.glob)
    # Megatron's imports warn of optional packages and of a missing GPU; neither is used here.
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = Parser(None)
    ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer")
    parser.set_defaults(tokenizer_type=_USUAL_TOKENIZER, pad_vocab_size=False)
    own.refuse_stray(argv, parser)
    parsed = parser.parse_args(of_tokenizer, args)
    check_no_pipes(parsed)
    return parsed


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that unfinished files are deleted
    if args.train_tokenizer is None:
        with written_together(*args.pair) as (binary, index):
            counts = write_pair(args, Encoder(args), binary, index)
    else:
        folder = Path(args.tokenizer_model)
        with written_together(folder / CONFIG, folder / TOKENIZER, *args.pair) as (config, tokenizer, binary, index):
            size = train_tokenizer(
                texts(args.files, args.json_key, skips_bad=args.on_error == "skip"),  # reported when they are tokenized
                args.train_tokenizer,
                tokenizer,
                config,
            )
            trained = argparse.Namespace(**vars(args) | {"tokenizer_model": str(tokenizer.parent)})
            counts = write_pair(args, Encoder(trained), binary, index)
        print(f"Tokenizer of {size} tokens saved in {folder}.")
    print(counts)
    print(f"Train on it with --data-path {args.output_prefix}")


def named_tokenizer(args: argparse.Namespace, of_tokenizer: Sequence[str]) -> argparse.Namespace:
    """Our own flags in `args`, with the kind and the place of the tokenizer."""
    parser = Parser(None, add_help=False)
    parser.add_argument("--tokenizer-type", default=_USUAL_TOKENIZER)
    parser.add_argument("--tokenizer-model")
    named, _ = parser.parse_known_args(of_tokenizer, argparse.Namespace(**vars(args)))
    return named


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not go together, or that name files which exist."""
    kind = args.tokenizer_type
    trains = args.train_tokenizer is not None
    if args.output_prefix.endswith("/"):
        raise ValueError(f"--output-prefix {args.output_prefix} is a folder; add a name, as in data/corpus")
    if kind == _USUAL_TOKENIZER and not args.tokenizer_model:
        raise ValueError("name a tokenizer's folder with --tokenizer-model DIR; --train-tokenizer makes one")
    if kind != _USUAL_TOKENIZER and trains:
        raise ValueError(f"--train-tokenizer makes a HuggingFaceTokenizer; drop --tokenizer-type {kind}")
    written = [*args.pair, Path(args.tokenizer_model, TOKENIZER)] if trains else args.pair
    existing = [path for path in written if path.exists()]
    if existing and not args.overwrite:
        raise ValueError(f"{existing[0]} exists; choose another name, or add --overwrite")


def write_pair(args: argparse.Namespace, encoder: Encoder, binary: Path, index: Path) -> str:
    """Write the tokens of all documents and their index; returns a sentence with the numbers of both."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tqdm import tqdm

    num_skipped = 0
    num_bytes = sum(path.stat().st_size for path in args.files)
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc=Path(args.output_prefix).name) as bar:
        builder = IndexedDatasetBuilder(str(binary), dtype=encoder.dtype)
        for place, ids in encoded(documents(args.files, bar.update), encoder, args.workers):
            if not isinstance(ids, str):
                builder.add_document(ids, [len(ids)])
            elif args.on_error == "stop":
                raise ValueError(f"{place}: {ids}; {WAY_OUT}")
            else:
                num_skipped += 1
                tqdm.write(f"skipped {place}: {ids}", file=sys.stderr)
        if not (lengths := builder.sequence_lengths):
            raise ValueError(f"none of the {num_skipped} document(s) can be used")
        builder.finalize(str(index))
    return f"{len(lengths):,} documents, {sum(lengths):,} tokens; {num_skipped:,} skipped."
