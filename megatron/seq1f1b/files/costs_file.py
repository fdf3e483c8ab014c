"""Costs of actions, from a JSON file or from a flag.

Tested in commands/test_bad_input.py by test_one_sentence.
"""

from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct, UnsetType, structs

from ..schedule import Costs, Shape
from .typed import NonNegative, converted, read_json

# For all units, for each segment, or for each stage and segment.
_Table = NonNegative | list[NonNegative | list[NonNegative]]


class _Costs(Struct, forbid_unknown_fields=True):
    f: _Table | UnsetType = UNSET
    i: _Table | UnsetType = UNSET
    w: _Table | UnsetType = UNSET
    message: _Table | UnsetType = UNSET
    message_f: _Table | UnsetType = UNSET
    message_b: _Table | UnsetType = UNSET
    activation: _Table | UnsetType = UNSET
    activation_for_w: _Table | UnsetType = UNSET
    move: NonNegative | UnsetType = UNSET


def read_costs(shape: Shape, text: str) -> tuple[Costs, float | None]:
    """The costs in a .json file, or written out as `f=1,message=0.5`, and the time of a copy to the host or back, None
    if it is not given. Raises ValueError for what is no set of costs, or of another shape."""
    if Path(text).suffix == ".json" or Path(text).exists():
        costs = read_json(text, _Costs)
    else:
        named: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, number = (word.strip() for word in part.partition("="))
            if not equals:
                raise ValueError(f"--costs {text}: {name!r} has no value; write names with numbers, as in f=1,i=1,w=1")
            if name in named:
                raise ValueError(f"--costs {text}: {name!r} is given twice")
            named[name] = number
        costs = converted(f"--costs {text}", named, _Costs, is_text=True)
    given = {name: value for name, value in structs.asdict(costs).items() if name != "move" and value is not UNSET}
    try:
        of_actions = Costs.from_mapping(shape, given)
    except ValueError as error:
        raise ValueError(f"--costs {text}: {error}") from None
    move = None if costs.move is UNSET else costs.move
    return of_actions, move
