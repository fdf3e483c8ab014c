"""Births and deaths add up to what was there at each moment."""

from megatron.seq1f1b.rehearsal.ledger import Category, Ledger, at


def moments_of(ledger):
    return {moment.name: moment for moment in ledger.moments()}


def test_peak_is_taken_between_births_and_deaths():
    ledger = Ledger()
    ledger.begin("F")
    first = ledger.birth(100)
    second = ledger.birth(30)
    ledger.death(first)
    ledger.birth(50)
    ledger.begin("B")
    ledger.death(second)
    moments = moments_of(ledger)
    assert (moments["F"].peak_bytes, moments["F"].end) == (130, 80)
    assert (moments["B"].peak_bytes, moments["B"].end) == (80, 50)


def test_a_label_holds_from_birth():
    ledger = Ledger()
    ledger.begin("F")
    number = ledger.birth(100)
    ledger.birth(1)
    ledger.begin("B")
    ledger.label(number, Category.STATE)
    assert moments_of(ledger)["F"].peak == {Category.STATE: 100, Category.ACTIVATIONS: 1}


def test_activations_of_one_moment_are_temporaries():
    ledger = Ledger()
    ledger.begin("F")
    ledger.birth(10)
    ledger.death(ledger.birth(7))
    ledger.fill_with(Category.LOGITS)
    ledger.death(ledger.birth(6))
    assert moments_of(ledger)["F"].peak == {Category.ACTIVATIONS: 10, Category.TEMPORARY: 7}


def test_the_highest_of_several_peaks_counts():
    ledger = Ledger()
    ledger.begin("F")
    for size in (5, 9, 7):
        ledger.death(ledger.birth(size))
    kept = ledger.birth(4)
    ledger.begin("B")
    ledger.death(kept)
    moments = moments_of(ledger)
    assert moments["F"].peak_bytes == 9 and moments["F"].end == 4
    assert moments["B"].peak_bytes == 4 and moments["B"].end == 0


def test_moments_in_words():
    assert at("2F3.1") == "in the forward of stage 2 for segment 1 of micro-batch 3"
    assert at("after 2W3.1") == "after the weight gradient of stage 2 for segment 1 of micro-batch 3"
    assert at("optimizer step") == "in the step of the optimizer"
