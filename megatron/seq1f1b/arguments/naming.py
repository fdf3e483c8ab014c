"""Flags in sentences as the keywords of a program that has no flags."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

# Flags of Megatron that a program sets under another name: as fields of a TransformerConfig, as a keyword of `install`.
_IN_A_PROGRAM: Mapping[str, str] = MappingProxyType(
    {"fp8_format": "fp8", "num_experts": "num_moe_experts", "reset_attention_mask": "keep_documents_apart"}
)
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")


@contextmanager
def keywords_in_errors() -> Iterator[None]:
    """Raises a ValueError from within again, with the keyword of the same name for every flag in its sentence."""
    try:
        yield
    except ValueError as error:
        sentence = _FLAG.sub(_keyword, str(error))
        if sentence == str(error):
            raise
        raise ValueError(sentence).with_traceback(error.__traceback__) from None


def _keyword(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return _IN_A_PROGRAM.get(name, name)
