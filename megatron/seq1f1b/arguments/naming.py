"""For programs without flags: sentences name keywords instead."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

# Flags of Megatron that are other names in a program: fields of a TransformerConfig, keywords of `install`.
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
