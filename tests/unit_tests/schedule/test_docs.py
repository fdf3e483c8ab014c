"""The worked example of docs/schedules.md does what the text promises."""

import re
from pathlib import Path

from hypothesis import given

from megatron.seq1f1b.schedule import (
    Costs,
    Kind,
    Placement,
    Shape,
    build,
    families,
    peak_memory,
    simulate,
    validate,
)

from .strategies import fixed, shapes

TEXT = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text(encoding="utf-8")


def example():
    source = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]
    assert len(source.splitlines()) <= 60
    names = dict(vars(families))
    exec(source, names)
    return names["eager_1f1b"]


EAGER = example()


def eager(shape):
    return EAGER(shape).schedule()


@fixed
@given(shapes(chunks=1))
def test_the_example_is_valid_and_warms_up_as_it_says(shape):
    schedule = eager(shape)
    validate(schedule)
    for rank, actions in enumerate(schedule.ranks):
        first = next(index for index, action in enumerate(actions) if action.kind is not Kind.F)
        warm_up = 2 * (shape.num_ranks - rank - 1) + shape.num_segments - 1
        assert first == min(warm_up + 1, shape.num_units)


def test_zb_h1_holds_on_all_ranks_what_1f1b_holds_on_the_first():
    shape = Shape(Placement(8), 16, 4)
    assert peak_memory(build("1f1b", shape), Costs.uniform(shape)) == [11, 10, 9, 8, 7, 6, 5, 4]
    assert peak_memory(build("zb-h1", shape), Costs.uniform(shape)) == [11] * 8


def test_the_example_hides_messages():
    shape = Shape(Placement(8), 16, 4)
    costs = Costs.uniform(shape, message=0.5)
    assert simulate(eager(shape), costs).bubble_ratio < simulate(build("1f1b", shape), costs).bubble_ratio
