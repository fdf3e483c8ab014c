"""The named schedules. Each is a function from the sizes of a pipeline to a clock."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..clock import Clock
from ..schedule import Shape
from .breadth_first import breadth_first
from .gpipe import gpipe
from .one_f_one_b import one_f_one_b
from .zb_h1 import zb_h1

Family = Callable[[Shape], Clock]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zb-h1": zb_h1,
        "breadth-first": breadth_first,
    }
)
