"""The facts about kinds of action agree with each other, and nothing that treats kinds apart has forgotten one."""

from collections import Counter

from megatron.seq1f1b.report.style import BOXES
from megatron.seq1f1b.schedule import COMPUTE_KINDS, FACTS, PAYLOADS, Costs, Holds, Kind, Placement, Shape


def test_every_kind_has_facts_and_every_compute_kind_a_colour():
    assert FACTS.keys() == {*Kind}
    assert BOXES.keys() == {*COMPUTE_KINDS}


def test_both_ends_of_a_message_agree():
    for payload in PAYLOADS:
        receive, send = sorted((kind for kind in Kind if kind.facts.payload is payload), key=lambda k: k.facts.is_send)
        assert send.facts.is_send and not receive.facts.is_send
        assert send.facts.hop == -receive.facts.hop != 0
        assert all(kind.facts.outcome is payload for kind in COMPUTE_KINDS if kind.facts.sends is send)
        readers = [kind for kind in COMPUTE_KINDS if kind.facts.receives is receive]
        assert readers and all((payload, receive.facts.hop, 0) in kind.facts.needs for kind in readers)


def test_both_ways_through_a_unit_begin_and_end_with_nothing():
    for kinds in ((Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W), (Kind.F, Kind.OFFLOAD, Kind.RELOAD, Kind.B)):
        holds = Holds.NOTHING
        for kind in kinds:
            assert kind.facts.before is holds
            holds = kind.facts.after
        assert holds is Holds.NOTHING


def test_the_halves_of_a_backward_are_the_whole():
    whole = Kind.B.facts
    halves = Kind.I.facts, Kind.W.facts
    for fact in ("gives_input_gradient", "gives_weight_gradient"):
        assert Counter(getattr(half, fact) for half in halves) == {True: 1, False: 1}
        assert getattr(whole, fact)
    assert whole.costs == halves[0].costs + halves[1].costs


def test_the_costs_of_a_kind_are_tables():
    costs = Costs.uniform(Shape(Placement(2), 1))
    assert all(costs.tables(kind) for kind in COMPUTE_KINDS)
    assert all(len(costs.tables(kind)) == len(kind.facts.costs) for kind in Kind)
