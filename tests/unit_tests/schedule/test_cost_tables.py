import pytest

from megatron.seq1f1b.schedule import Costs, Placement, Shape


@pytest.mark.parametrize(
    "value", [[], [[]], "much", None, {"0": 1}, 10**400, float("nan"), float("inf"), [1, "x"]], ids=str
)
def test_a_cost_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="cost table 'f'"):
        Costs.from_mapping(Shape(Placement(1), 1, 2), {"f": value})
    with pytest.raises(ValueError, match="table of names and numbers"):
        Costs.from_mapping(Shape(Placement(1), 1, 2), [value])
