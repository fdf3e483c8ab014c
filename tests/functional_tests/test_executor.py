"""Our executor as the `forward_backward_func` of programs other than megatron.training: what they can rely on.

The model is one linear layer a stage, without code of Megatron's: no process groups but those that are passed in.
"""

import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.timers import Timers

from megatron.seq1f1b.process.ranks import results_on_all_ranks
from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation
from megatron.seq1f1b.runtime import executor as executor_file
from megatron.seq1f1b.runtime.communication import Communicator
from megatron.seq1f1b.runtime.segments.segmentation import on_all_ranks
from megatron.seq1f1b.schedule import Costs, Kind, Placement, ScheduleChoice, Shape, build
from support.linear_stages import SEQUENCE, Stage, batches, call, configuration, executor, forward_step, sum_of_squares
from support.on_ranks import on_ranks

MICROBATCHES = 3


def groups(alone: bool = False) -> ProcessGroupCollection:
    """Of a pipeline of all ranks, or of this one."""
    own, _ = dist.new_subgroups(1)
    pipeline = own if alone else dist.group.WORLD
    return ProcessGroupCollection(pp=pipeline, tp=own, cp=own, dp_cp=own, embd=None, pos_embd=None)


def stage(ranks: int = 2) -> Stage:
    return Stage(configuration(ranks), dist.get_rank())


def run(function, model, step=forward_step, microbatches=MICROBATCHES, **given):
    for chunk in model if isinstance(model, list) else [model]:
        chunk.zero_grad()
    return call(function, model, microbatches, step, **given)


def gradients(model: Stage) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters()]


def in_a_row(placement: Placement) -> tuple[list[Stage], list[list[torch.Tensor]]]:
    """The stages that this rank has, and their gradients where all run here, one after the other."""
    stages = [Stage(configuration(2), number) for number in range(placement.num_stages)]
    total = 0
    for tokens in batches(MICROBATCHES):
        for each in stages:
            tokens = each(tokens)
        total += tokens.square().mean() / MICROBATCHES
    total.backward()
    here = [stages[number] for number in placement.stages_of(dist.get_rank())]
    return here, [gradients(each) for each in here]


def assert_gradients(chunks: list[Stage], expected: list[list[torch.Tensor]]) -> None:
    for chunk, grads in zip(chunks, expected, strict=True):
        assert all(map(torch.allclose, gradients(chunk), grads))


@on_ranks(2)
def test_one_rank_runs_without_the_others():
    """Megatron's training loop collects what is not a loss on the last rank only."""
    alone = groups(alone=True)
    if dist.get_rank() == 1:
        for forward_only in (True, False):
            reports = run(executor(k=1), stage(ranks=1), pg_collection=alone, forward_only=forward_only)
            assert len(reports) == MICROBATCHES


@on_ranks(2)
@pytest.mark.parametrize("family, placement", [("auto", Placement(2)), ("zb-h1", Placement(2, 2, "v"))], ids=str)
def test_a_whole_schedule_brings_its_placement_and_size(family, placement):
    """It takes training steps of its size, and evaluates on any."""
    model, expected = in_a_row(placement)
    has_loss, collection = dist.get_rank() == placement.rank_of(placement.num_stages - 1), groups()
    given = executor(ScheduleChoice.of(build(family, Shape(placement, MICROBATCHES))), k=1)
    assert len(run(given, model, pg_collection=collection)) == MICROBATCHES * has_loss
    assert_gradients(model, expected)
    with torch.no_grad():
        evaluated = run(given, model, microbatches=2, pg_collection=collection, forward_only=True)
    assert len(evaluated) == 2 * has_loss
    with pytest.raises(ValueError, match="3 micro-batches"):
        run(given, model, microbatches=2, pg_collection=collection)


class OnDevice(Communicator):
    """Messages over gloo that are taken for kernels of a GPU."""

    turns = 0

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self._messages_are_kernels = True

    def finish(self):
        OnDevice.turns += self.goes_in_turn
        super().finish()


def sequences_first():
    """Batches [b, n, h], as in Megatron's data sets."""
    return (tokens.transpose(0, 1) for tokens in batches(100))


@on_ranks(2)
def test_messages_used_in_another_order_than_sent():
    """In a schedule of a user's own, rank 1 begins its second chunk before the last unit of its first. Also as on a
    GPU, where the first step is special."""
    placement, collection = Placement(2, 2), groups()
    order = build("breadth-first", Shape(placement, MICROBATCHES, 2))
    second, units = list(order.ranks[1]), 2 * MICROBATCHES
    second[units - 1 : units + 1] = second[units], second[units - 1]
    order = replace(order, ranks=(order.ranks[0], tuple(second)))
    sent, used = (
        [(action.microbatch, action.segment, action.stage // 2) for action in rank if action.kind is Kind.F]
        for rank in order.ranks
    )
    assert sent != used

    def step(data_iterator, model):
        return model(next(data_iterator).transpose(0, 1)), sum_of_squares

    model, expected = in_a_row(placement)
    for kind in (Communicator, OnDevice):
        with patch.object(executor_file, "Communicator", kind):
            given = executor(ScheduleChoice.of(order), k=2)
            for _ in range(2):
                run(given, model, step, pg_collection=collection, data_iterator=[sequences_first(), sequences_first()])
                assert_gradients(model, expected)
    assert OnDevice.turns == 1, "the first step has messages in turn, the second has not"


@on_ranks(2)
def test_the_first_step_of_each_model_is_special():
    """A critic beside an actor may need kernels that are not loaded yet, while messages occupy the GPU."""
    collection = groups()
    with patch.object(executor_file, "Communicator", OnDevice):
        given = executor(k=2)
        turns = []
        actor, critic = stage(), stage()
        for model in (actor, critic, actor, critic):
            before = OnDevice.turns
            run(given, model, pg_collection=collection)
            turns.append(OnDevice.turns - before)
    assert turns == [1, 1, 0, 0]


@on_ranks(2)
def test_a_rerun_on_rewound_iterators():
    """Megatron runs a step again to see whether it gives the same; each run reads every micro-batch once."""

    def step(data_iterator, model):
        output = model(next(data_iterator).transpose(0, 1))

        def loss_func(output):
            loss = output.square().sum()
            get_rerun_state_machine().validate_result(loss, rejection_func=torch.isnan, message="loss")
            return loss, torch.tensor(output.numel()), {"loss": loss.detach()}

        return output, loss_func

    destroy_rerun_state_machine()  # Megatron makes one at the first call
    initialize_rerun_state_machine(mode=RerunMode.REPORT_DETERMINISM_STATS)
    collection, model, schedule, rest = groups(), stage(), executor(k=2), sequences_first()
    iterator, seen = RerunDataIterator(rest), []
    for _ in range(2):
        while get_rerun_state_machine().should_run_forward_backward(iterator):
            given = {"data_iterator": [iterator], "decoder_seq_length": SEQUENCE}
            reports = run(schedule, model, step, pg_collection=collection, **given)
            assert len(iterator.saved_microbatches) == MICROBATCHES
            seen.append((reports, gradients(model)))
    first, again, second, _ = seen
    assert first[0] == again[0] and all(map(torch.equal, first[1], again[1]))
    assert len(first[0]) == MICROBATCHES * dist.get_rank()
    assert not torch.equal(first[1][0], second[1][0])
    assert len([*rest]) == 100 - 2 * MICROBATCHES


@on_ranks(2)
def test_ranks_that_disagree_all_raise_before_a_message():
    collection, rank = groups(), dist.get_rank()
    for differing in ({"schedule": ("1f1b", "gpipe")[rank]}, {"k": 1 + rank}):
        with pytest.raises(ValueError, match="rank 1 has") as refusal:
            run(executor(**differing), stage(), pg_collection=collection)
        assert "rank 0 has" not in str(refusal.value)


@on_ranks(2)
def test_ranks_that_plan_other_orders_all_raise():
    """Their messages would be taken for one another: `auto` plans on every rank, for costs that it has there."""
    collection, rank = groups(), dist.get_rank()

    def costs(lengths):
        shape = Shape(Placement(2), MICROBATCHES, len(lengths))
        return Costs.uniform(shape, w=(1, 5)[rank], message=(0, 3)[rank])

    with pytest.raises(ValueError, match=r"rank 1 has the order \w+ of 2 ranks, 3 micro-batches, 2 segments, planned"):
        run(executor("auto", k=2, costs=costs), stage(), pg_collection=collection)
    dist.barrier()


def fails_at(rank: int, number: int, others_wait: bool = False):
    """A forward step that raises in its `number`-th call on a rank; the other one may be stuck."""
    calls = count(1)

    def step(data_iterator, model):
        if others_wait and dist.get_rank() != rank:
            time.sleep(90)
        if (dist.get_rank(), next(calls)) == (rank, number):
            raise KeyError("no more data")
        return forward_step(data_iterator, model)

    return step


@on_ranks(2)
def test_after_a_failure_no_rank_takes_a_step():
    """The other ranks fail within the timeout even if the process of the failed one lives on and catches the error."""
    rank, failing, model, collection = dist.get_rank(), executor(k=1, timeout=5), stage(), groups()
    words = "rank 1 failed in this step: KeyError: 'no more data'\npipeline rank 0 failed at 0B"
    kind, found = (KeyError, "1 failed at 1F1.0, among 1.*1B0.0.* 1F1.0") if rank else (RuntimeError, words)
    with pytest.raises(kind, match=found):
        run(failing, model, fails_at(1, 2), pg_collection=collection)
    reason = "KeyError: " if rank else "rank 1 failed in this step: KeyError: "
    with pytest.raises(RuntimeError, match=rf"an earlier step of this pipeline failed \({reason}"):
        run(failing, model, pg_collection=collection)


def raise_at(rank: int, error: Exception) -> None:
    if dist.get_rank() == rank:
        raise error


@on_ranks(2)
def test_all_ranks_have_the_results_of_all_or_the_error_of_one():
    """They are together after an error, too."""
    own, _ = dist.new_subgroups(1)
    for group in (None, dist.new_group()):
        for rank in (0, 1):
            full = ValueError(f"rank {rank} has no room")
            with pytest.raises(ValueError, match=f"^rank {rank} has no room$"):
                results_on_all_ranks(partial(raise_at, rank, full), "a test", group)
            kind = KeyError if dist.get_rank() == rank else RuntimeError
            with pytest.raises(kind, match="no data"):
                results_on_all_ranks(partial(raise_at, rank, KeyError("no data")), "a test", group)
        assert results_on_all_ranks(dist.get_rank, "a test", group) == [0, 1]
    assert results_on_all_ranks(dist.get_rank, "a test", own) == [dist.get_rank()]


@on_ranks(2)
def test_a_model_that_one_rank_cannot_run_is_refused_by_all():
    """The second one that the program brings, of which rank 1 has a layer that cannot run on segments. No rank begins a
    step of it, and all may take others."""
    given, collection, first, second = executor(k=2, timeout=5), groups(), stage(), stage()

    def attach(chunks, *_):
        if dist.get_rank() == 1 and second in chunks:
            raise ValueError("layer 3 caps its scores")

    with patch.object(executor_file, "attach", attach):
        run(given, first, pg_collection=collection)
        for _ in range(2):
            with pytest.raises(ValueError, match="^layer 3 caps its scores$"):
                run(given, second, pg_collection=collection)
        run(given, first, pg_collection=collection)
    assert second.calls == []
    run(given, second, pg_collection=collection)


@on_ranks(2)
def test_a_plan_that_one_rank_cannot_run_is_refused_by_all():
    """A cut that fails, and a call that is refused, when a step of another size comes."""
    rank, collection, model = dist.get_rank(), groups(), stage()

    def halves(length):
        if rank == 1 and length == SEQUENCE // 2:
            raise ValueError("no sequence of 4 tokens can be cut")
        return [length // 2] * 2

    given = PipelineExecutor(ScheduleChoice("1f1b"), Segmentation(2, halves), timeout=timedelta(seconds=5))
    run(given, model, pg_collection=collection)
    half = [tokens[: SEQUENCE // 2] for tokens in batches(MICROBATCHES)]
    with pytest.raises(ValueError, match="^no sequence of 4 tokens can be cut$"):
        run(given, model, pg_collection=collection, seq_length=SEQUENCE // 2, data_iterator=[iter(half)])
    data = [batches(2)] * (1 + rank)
    with pytest.raises(ValueError, match="^1 model chunks need a data iterator each, but 2 were given$"):
        run(given, model, microbatches=2, pg_collection=collection, data_iterator=data)
    run(given, model, pg_collection=collection)
    run(given, model, microbatches=2, pg_collection=collection)


@on_ranks(2)
def test_a_search_that_fails_on_one_rank_fails_on_all():
    def costs(lengths):
        if dist.get_rank() == 1:
            raise ValueError("the machine file has no GPU of this kind")
        return Costs.uniform(Shape(Placement(2), MICROBATCHES, len(lengths)))

    with pytest.raises(ValueError, match="^the machine file has no GPU of this kind$"):
        run(executor("auto", k=2, costs=costs), stage(), pg_collection=groups())
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize("family", ["1f1b", "auto"])
def test_ranks_exchange_nothing_before_a_step_that_they_know(family):
    """Each of two models has a plan for training and one for evaluation; at another number of micro-batches all ranks
    prepare again."""
    given, collection, models = executor(family, k=2), groups(), (stage(), stage())
    with patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as exchange:
        numbers = []
        for _ in range(2):
            for model in models:
                for forward_only in (False, True):
                    before = exchange.call_count
                    run(given, model, pg_collection=collection, forward_only=forward_only)
                    numbers.append(exchange.call_count - before)
        assert all(numbers[:4]) and not any(numbers[4:])
        run(given, models[0], microbatches=2, pg_collection=collection)
        assert exchange.call_count > sum(numbers)


@on_ranks(2)
def test_ranks_that_wait_for_a_search_say_so():
    """Rank 0 searches longer than a wait may take."""
    rank, collection = dist.get_rank(), groups()
    collection.pp = dist.new_group(timeout=timedelta(seconds=2))

    def costs(lengths):
        if rank == 0:
            time.sleep(8)
        return Costs.uniform(Shape(Placement(2), MICROBATCHES, len(lengths)))

    order = r"the order of 2 ranks, 3 micro-batches, 2 segments, planned for segments of \[4, 4\] tokens"
    known = {
        0: rf"rank 0 waited 0 s in vain for all ranks to prepare {order}; rank 1 waited 2 s in vain",
        1: rf"nothing moved for 2 s; .*; rank 0 prepares {order}; rank 1 waited 2 s in vain for all ranks to",
    }
    given = executor("auto", k=2, costs=costs)
    with pytest.raises(RuntimeError, match=known[rank]):
        run(given, stage(), pg_collection=collection)
    with pytest.raises(RuntimeError, match="an earlier step of this pipeline failed .*waited 2 s in vain"):
        run(given, stage(), pg_collection=collection)
    dist.barrier()  # rank 0 has the store with the notes


@on_ranks(2)
def test_ranks_of_which_one_prepares_what_the_other_knows_say_so():
    """Rank 0 waits for messages of rank 1 meanwhile."""
    rank, collection, model = dist.get_rank(), groups(), stage()
    collection.pp = dist.new_group(timeout=timedelta(seconds=6))
    given = executor("auto", k=2, timeout=2)
    run(given, model, pg_collection=collection)
    if rank == 1:
        given._orders.clear()
    order = r"the order of 2 ranks, 3 micro-batches, 2 segments, planned for segments of \[4, 4\] tokens"
    known = {
        0: rf"rank 1 waits for all ranks to prepare {order}",
        1: rf"rank 1 waited \d s in vain for all ranks to prepare {order}",
    }
    with pytest.raises(RuntimeError, match=known[rank]):
        run(given, model, pg_collection=collection)
    dist.barrier()  # rank 0 has the store with the notes


@on_ranks(2)
def test_a_failed_step_of_one_rank_leaves_no_timer_running():
    """It may take another step, as after an error in its data."""
    if dist.get_rank() == 1:
        return
    alone, model, failing = groups(alone=True), stage(ranks=1), executor(k=2)
    model.config.barrier_with_L1_time = False
    model.config.timers = timers = Timers(2, "minmax")
    with patch.object(torch.cuda, "synchronize", lambda *_: None):
        timers("interval-time", log_level=0).start()
        for step in (fails_at(0, 2), forward_step_that_fails_in_the_loss):
            with pytest.raises(KeyError):
                run(failing, model, step, pg_collection=alone)
            run(failing, model, pg_collection=alone)
        timers("interval-time").stop()


def forward_step_that_fails_in_the_loss(data_iterator, model):
    def fail(output):
        raise KeyError("no labels")

    return model(next(data_iterator)), fail


def larger(data_iterator, model):
    """A batch of one sequence more."""
    tokens = next(data_iterator)
    return model(torch.cat([tokens, tokens[:, :1]], dim=1)), sum_of_squares


def of_another_type(data_iterator, model):
    output, loss_function = forward_step(data_iterator, model)
    return output.double(), loss_function


def within_itself(data_iterator, model):
    return within_itself.executor(forward_step_func=None)


REFUSED = {
    "larger": (
        larger,
        r"0SEND_F0.0 .*: the output of a stage is torch.float32 \[.*, but the next rank expects torch.f",
    ),
    "of another type": (
        of_another_type,
        r"0SEND_F0.0 .* is torch.float64 \[.*, but the next rank expects torch.float32",
    ),
    "within itself": (within_itself, "a step was called while another step runs"),
    "ended": (forward_step, "a data iterator ended before micro-batch 0 of its step; give more data, or run fewer"),
}


@on_ranks(2)
def test_what_the_next_rank_cannot_use_is_not_sent():
    """It would take garbage for a message, or wait; here it waits until the timeout."""
    for step, sentence in REFUSED.values():
        collection, model, failing = groups(), stage(), executor(k=1, timeout=3)
        collection.pp = dist.new_group()  # gloo closes its connections after a timeout
        within_itself.executor = failing
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match=f"rank 0 failed in this step: ValueError: .*{sentence}"):
                run(failing, model, pg_collection=collection)
        else:
            data = {"data_iterator": iter([])} if step is forward_step else {}
            with pytest.raises(ValueError, match=sentence):
                run(failing, model, step, pg_collection=collection, **data)
        dist.barrier()  # rank 0 has the store with its words


def doubled(data_iterator, model):
    output, loss_function = forward_step(data_iterator, model)
    return 2 * output, loss_function


def doubled_in_place(data_iterator, model):
    output, loss_function = forward_step(data_iterator, model)
    output[0] *= 2
    return output, loss_function


@on_ranks(2)
def test_a_changed_output_of_a_stage_is_refused():
    """It has gone to the next stage before the program gets it."""
    for step in (doubled, doubled_in_place):
        collection = groups()
        collection.pp = dist.new_group()
        words = "changes the output of a stage before the last"
        kind = RuntimeError if dist.get_rank() == 1 else ValueError
        with pytest.raises(kind, match=words):
            run(executor(k=2, timeout=3), stage(), step, pg_collection=collection)
        dist.barrier()


@on_ranks(2)
def test_an_error_in_data_read_ahead_is_raised_on_all_ranks():
    def read() -> None:
        raise ValueError(f"rank {dist.get_rank()} finds no documents")

    rank, collection = dist.get_rank(), groups()
    step = SimpleNamespace(rank=rank, placement=Placement(2), pipeline=collection.pp, groups=collection)
    with pytest.raises(ValueError, match="^rank 0 finds no documents$"):
        on_all_ranks(step, read)


def fail_while_stuck() -> None:
    """Rank 0 raises in its fourth call, when nobody has received what it sent, and nobody catches the error."""
    step = fails_at(0, 4, others_wait=True)
    run(executor("gpipe", k=1, timeout=600), stage(), step, 6, pg_collection=groups())


def test_a_failing_rank_ends_a_job_that_is_stuck(launch):
    with pytest.raises(AssertionError, match=r"(?s)^exit code 1;.*pipeline rank 0 failed at 0F3.0, among"):
        launch.call(2, fail_while_stuck, timeout=60)
