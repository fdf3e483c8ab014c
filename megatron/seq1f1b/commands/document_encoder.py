"""Documents as token ids, by Megatron's tokenizers.

Tested in commands/test_preprocess.py.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..process.hub import spare_hub
from .corpus_documents import Document, text_of


class Encoder:
    """Turns documents into ids of the smallest type that holds the vocabulary, by Megatron's tokenizer of the flags."""

    def __init__(self, args: argparse.Namespace) -> None:
        from megatron.core.datasets.indexed_dataset import DType
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        spare_hub(args.tokenizer_type, args.tokenizer_model)
        self.tokenizer = build_tokenizer(args)
        self._end = [self.tokenizer.eod] if args.append_eod else []
        if any(token not in range(self.tokenizer.vocab_size) for token in self._end):
            raise ValueError(f"the {args.tokenizer_type} has no end token in its vocabulary; leave out --append-eod")
        self.dtype = DType.optimal_dtype(self.tokenizer.vocab_size)
        self._key = args.json_key

    def encode(self, batch: Sequence[Document]) -> list[np.ndarray | str]:
        """The ids of each document, or what is wrong with it."""
        library: Any = getattr(self.tokenizer, "_tokenizer", None)
        try:
            texts = [text_of(document, self._key) for document in batch]
            if not hasattr(library, "include_special_tokens"):
                return [self._checked(self.tokenizer.tokenize(text)) for text in texts]
            # Hugging Face's take many texts in one call, which is faster.
            encoded = library.tokenizer(
                texts, add_special_tokens=library.include_special_tokens, return_attention_mask=False
            )
            return [self._checked(ids) for ids in encoded["input_ids"]]
        except Exception as error:  # libraries raise many kinds, for one of the documents
            if len(batch) == 1:
                return [str(error)]
            results = []
            for document in batch:
                results += self.encode([document])
            return results

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        if not ids:
            raise ValueError("it is empty")
        if min(ids) < 0 or max(ids) >= self.tokenizer.vocab_size:
            raise ValueError(f"token id outside the vocabulary of {self.tokenizer.vocab_size}")
        return np.array([*ids, *self._end], self.dtype)
