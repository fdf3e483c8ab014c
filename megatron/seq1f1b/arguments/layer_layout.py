"""--pipeline-model-parallel-layout: which layers each stage has.

Tested in arguments/test_supported.py by test_a_rank_has_one_copy_of_the_embedding.
"""

import re
from typing import Any

_SYMBOLS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def stages_of_layout(layout: Any) -> list[str]:
    """The symbols of each stage in the order of depth, from the text of the flag, in which Megatron allows repetitions,
    or from what Megatron has parsed: layers by rank, then chunk."""
    if not isinstance(layout, str):
        chunks = zip(*layout.layout, strict=True)
        return ["".join(_SYMBOLS.get(layer.name, "") for layer in stage) for chunk in chunks for stage in chunk]
    text = re.sub(r"\(([^)]*)\)\*(\d+)|(\w|\|)\*(\d+)", lambda m: (m[1] or m[3]) * int(m[2] or m[4]), layout)
    return text.replace(",", "").split("|")
