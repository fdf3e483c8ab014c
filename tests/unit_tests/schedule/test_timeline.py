from megatron.seq1f1b.schedule import Action, Kind, Placement, Shape, Span, Timeline


def test_idle_time_of_a_timeline():
    spans = (Span(Action(Kind.F, 0, 0, 0), 10.0, 11.0), Span(Action(Kind.REDUCE, 0), 11.0, 14.0))
    timeline = Timeline(Shape(Placement(1), 1), (spans,))
    assert timeline.makespan == 4.0
    assert timeline.busy(0) == 1.0
    assert timeline.bubble_ratio == 0.75
