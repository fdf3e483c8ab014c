"""--pipeline-model-parallel-layout: which layers each stage has.

Tested in arguments/test_unsupported.py by test_a_rank_has_one_copy_of_the_embedding.
"""

import re
from typing import Any

_SYMBOLS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
# Repetitions in the text of the flag: `(tt|)*3`, `t*3`, `|*2`.
_REPEATED = re.compile(
    r"""
    \((?P<group>[^)]*)\)\*(?P<times_of_group>\d+)
    | (?P<symbol>\w|\|)\*(?P<times_of_symbol>\d+)
    """,
    re.VERBOSE,
)


def stages_of_layout(layout: Any) -> list[str]:
    """The symbols of each stage in the order of depth, from the text of the flag, in which Megatron allows repetitions,
    or from what Megatron has parsed: layers by rank, then chunk."""
    if not isinstance(layout, str):
        stages = []
        for chunk in zip(*layout.layout, strict=True):  # the stages of all ranks
            for layers in chunk:
                stages.append("".join(_SYMBOLS.get(layer.name, "") for layer in layers))
        return stages
    return _REPEATED.sub(_repeat, layout).replace(",", "").split("|")


def _repeat(match: re.Match[str]) -> str:
    if match["group"] is not None:
        return match["group"] * int(match["times_of_group"])
    return match["symbol"] * int(match["times_of_symbol"])
