"""Laws of the critical batch size, and the configuration that trains soonest."""

import pytest

from megatron.seq1f1b.commands.model_flags import gpt_of, model_of, read_model
from megatron.seq1f1b.commands.train_time import LAWS, loss, soonest
from unit_tests.planning.planner.question import small


def test_the_law_by_tokens_meets_what_its_authors_measured():
    """1.2B on 24.6e9 tokens of 512 each: 2048 sequences take 25000 steps where 256 take 176000, which is less than
    20 % more than an eighth; 4096 take 15360, which is more (plots/chinchilla.ipynb of the authors)."""
    assert 25000 < 1.2 * 176000 * 256 / 2048 and 15360 > 1.2 * 176000 * 256 / 4096
    assert 2048 < LAWS["tokens"].largest(1.2e9, 187500 * 256 * 512) / 512 < 4096


def test_the_law_by_noise_doubles_with_every_eighth_of_loss():
    """As arXiv 2001.08361 describes equation 1.4: twice as large for every 13 % of loss."""
    assert loss(1.5e9, 22e9) == pytest.approx(2.4, abs=0.2)
    growth = 0.87 ** (-1 / 0.21)
    assert growth == pytest.approx(2, rel=0.05)
    largest = LAWS["noise-scale"].largest
    assert largest(1e9, 1e11) < largest(1e10, 1e11) < largest(1e10, 1e12)


def test_the_law_of_olmo_averages_over_the_run():
    largest = LAWS["olmo"].largest
    assert largest(1e9, 100e9) == pytest.approx(1024 * 4096)
    assert largest(1e9, 336e9) == pytest.approx(1536 * 4096)
    assert 2048 * 4096 < largest(1e9, 2e12) < 4096 * 4096


def test_the_three_term_law_is_flat_around_its_optimum():
    law = LAWS["three-term"]
    assert law.largest(1e9, 1e11) == pytest.approx(2 * 1.12 * 1e6, rel=0.02)
    assert [law.overhead(share) for share in (1, 0.5, 0.25)] == pytest.approx([1.05, 1.0, 1.05])


def test_more_devices_train_sooner_and_take_more_hours():
    one = {"chunks": (1,), "segments": (1,), "micro_batches": (1,), "families": ("1f1b",)}
    asked = (small(num_devices=count, sequence_length=2048, **one) for count in (4, 16))
    few, many = (soonest(each, 1e9, LAWS["tokens"], 16 * 2048, shares=(1.0,)) for each in asked)
    assert many.days < few.days and 16 * many.days >= 0.99 * 4 * few.days
    assert few.steps * 16 * 2048 == pytest.approx(1.2e9)
    assert few.plan.memory_gib <= 16
    assert soonest(small(memory_gib=0.1), 1e9, LAWS["olmo"], 16 * 2048, shares=(1.0,)) is None


@pytest.mark.parametrize("billions", [1, 7, 70, 175, 1000])
def test_a_gpt_of_a_number_of_parameters_has_about_as_many(billions):
    shape = model_of(read_model(gpt_of(billions * 1e9).split()))
    assert 12 * shape.num_layers * shape.hidden_size**2 == pytest.approx(billions * 1e9, rel=0.25)
