"""Messages that share a port arrive as a fluid would; a simulated step keeps to what its ports can carry."""

from heapq import heappop

import pytest

from megatron.seq1f1b.costs.execution import execute_lowered
from megatron.seq1f1b.costs.ports import Event, MessageQueue, Port
from megatron.seq1f1b.schedule import Placement, Shape, build, lower
from megatron.seq1f1b.schedule.cost_tables import Costs


@pytest.mark.parametrize(
    "sends, arrivals",
    [
        ({"f": [(1.0, 3.0)]}, {"f": [4.0]}),
        ({"f": [(0.0, 2.0)], "b": [(0.0, 2.0)]}, {"f": [4.0], "b": [4.0]}),
        ({"f": [(0.0, 2.0)], "b": [(1.0, 2.0)]}, {"f": [3.0], "b": [4.0]}),
        ({"f": [(0.0, 1.0), (0.0, 1.0)]}, {"f": [1.0, 2.0]}),
        ({"f": [(0.0, 1.0), (0.0, 1.0)], "b": [(0.0, 3.0)]}, {"f": [2.0, 4.0], "b": [5.0]}),
        ({"f": [(0.0, 1.0)], "b": [(0.0, 2.0)], "c": [(0.0, 3.0)]}, {"f": [3.0], "b": [5.0], "c": [6.0]}),
    ],
    ids=["alone", "at once", "the second joins", "one channel", "two channels", "three channels"],
)
def test_messages_on_their_way_share_the_port(sends, arrivals):
    """By channel, messages by time and seconds if alone, and when they arrive."""
    events: list[Event] = []
    port = Port(0, events)
    channels = {name: MessageQueue(port) for name in sends}
    to_send = sorted((time, name, seconds) for name, messages in sends.items() for time, seconds in messages)
    while to_send or events:
        if to_send and (not events or to_send[0][0] <= events[0][0]):
            time, name, seconds = to_send.pop(0)
            channels[name].post(time)
            channels[name].send(time, seconds)
            continue
        time, _, number = heappop(events)
        if number == port.last_event:
            port.leave(time).arrive(time)
    assert {name: pytest.approx(list(channel.arrived)) for name, channel in channels.items()} == arrivals


@pytest.mark.parametrize("placement", [Placement(2), Placement(2, 2), Placement(3, 2, "v"), Placement(3, 2)], ids=str)
@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_a_step_takes_as_long_as_its_ports_need(family, placement):
    """Messages take so long that the busiest port decides."""
    shape = Shape(placement, 8, 2)
    message = 20.0
    timeline = execute_lowered(lower(build(family, shape)), Costs.uniform(shape, message=message))
    sent = [0] * placement.num_ranks
    for stage in range(placement.num_stages):
        for neighbour in (stage - 1, stage + 1):
            in_range = 0 <= neighbour < placement.num_stages
            if in_range and placement.rank_of(neighbour) != placement.rank_of(stage):
                sent[placement.rank_of(stage)] += shape.num_units
    assert timeline.makespan >= message * max(sent)


def test_without_a_receive_a_message_does_not_start():
    events: list[Event] = []
    channel = MessageQueue(Port(0, events))
    channel.send(0.0, 1.0)
    assert not events
    channel.post(5.0)
    assert events == [(6.0, 0, 1)]
