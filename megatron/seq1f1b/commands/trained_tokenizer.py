"""A byte-level BPE trained on a corpus, in the files of a HuggingFaceTokenizer.

Tested in commands/test_preprocess.py by test_an_existing_pair_or_tokenizer_is_replaced_on_request.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The files in the folder of a HuggingFaceTokenizer.
TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"
FEWEST_TOKENS = 256 + 2  # the bytes, and the two above


def train_tokenizer(texts: Iterable[str], size: int, tokenizer: Path, config: Path) -> int:
    """Train on `texts` for a vocabulary of at most `size` tokens, and write the two files. Returns the number of tokens
    found, which few texts do not fill."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts,
        vocab_size=size,
        min_frequency=0,
        show_progress=sys.stderr.isatty(),
        special_tokens=[END_OF_DOCUMENT, PADDING],
    )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 62,
    }
    config.write_text(json.dumps(settings, indent=2))
    tokenizer.write_text(trained.to_str(pretty=True), encoding="utf-8")
    return trained.get_vocab_size()
