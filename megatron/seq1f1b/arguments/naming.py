"""The names of parameters in errors: flags on a command line, keywords in a program."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType

from ..errors import ParameterError, by_keyword

# The parameters of the pure rooms that a user sets under another name: of `install`, of Megatron or of a command.
_KEYWORDS: Mapping[str, str] = MappingProxyType(
    {
        "num_devices": "gpus",
        "num_segments": "sequence_splits",
        "sequence_length": "seq_length",
        "strategy": "sequence_split_strategy",
        "lengths_file": "sequence_split_file",
        "profile": "sequence_split_profile",
        "pattern": "hybrid_layer_pattern",
    }
)
# Flags of Megatron that a program sets under another name: as fields of a TransformerConfig, as a keyword of `install`.
_IN_A_PROGRAM: Mapping[str, str] = MappingProxyType(
    {"fp8_format": "fp8", "num_experts": "num_moe_experts", "reset_attention_mask": "keep_documents_apart"}
)
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")


class Naming(Enum):
    """How an error names parameters: as the flags that were typed, or as the keywords of a program."""

    FLAGS = "--sequence-splits 8"
    KEYWORDS = "sequence_splits=8"

    def __call__(self, parameter: str, value: object) -> str:
        keyword = _KEYWORDS.get(parameter, parameter)
        if self is Naming.KEYWORDS:
            return by_keyword(keyword, value)
        flag = f"--{keyword.replace('_', '-')}"
        return flag if value is None else f"{flag} {value}"

    def sentence(self, error: ValueError) -> str:
        """The text of an error with these names.

        This room's own sentences have flags, and so does the table of what is unsupported; in a program the keyword of
        the same name stands for each of them.
        """
        text = error.named(self) if isinstance(error, ParameterError) else str(error)
        if self is Naming.KEYWORDS:
            text = _FLAG.sub(_keyword, text)
        return text

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Raises a ValueError from within again with these names."""
        try:
            yield
        except ValueError as error:
            sentence = self.sentence(error)
            if sentence == str(error):
                raise
            raise ValueError(sentence).with_traceback(error.__traceback__) from None


def _keyword(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return _IN_A_PROGRAM.get(name, name)
