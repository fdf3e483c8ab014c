"""What a program that calls our executor as Megatron's `forward_backward_func` can rely on; started on two ranks.

The model is one linear layer a stage, without code of Megatron's: no process groups but those that are passed in.
"""

import sys
import time
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.seq1f1b import cpu

cpu.activate()

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.pipeline_parallel.schedules import (  # noqa: E402
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.rerun_state_machine import (  # noqa: E402
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.seq1f1b.runtime import PipelineExecutor, Segmentation  # noqa: E402
from megatron.seq1f1b.runtime import executor as executor_file  # noqa: E402
from megatron.seq1f1b.runtime.communication import Communicator  # noqa: E402
from megatron.seq1f1b.schedule import Kind, Placement, ScheduleChoice, Shape, build  # noqa: E402
from support.linear_stages import (  # noqa: E402
    SEQUENCE,
    Stage,
    batches,
    call,
    configuration,
    forward_step,
    raises,
    run_checks,
    sum_of_squares,
)

MICROBATCHES = 3


def stage(pipeline: dist.ProcessGroup) -> Stage:
    return Stage(configuration(pipeline.size()), pipeline.rank())


def groups(pipeline: dist.ProcessGroup, alone: dist.ProcessGroup) -> ProcessGroupCollection:
    return ProcessGroupCollection(pp=pipeline, tp=alone, cp=alone, dp_cp=alone, embd=None, pos_embd=None)


def run(function, model, step=forward_step, microbatches=MICROBATCHES, **given):
    for chunk in model if isinstance(model, list) else [model]:
        chunk.zero_grad()
    return call(function, model, microbatches, step, **given)


def executor(schedule=ScheduleChoice("1f1b"), k=1, timeout=60.0) -> PipelineExecutor:  # noqa: B008
    return PipelineExecutor(
        schedule, Segmentation(k, lambda length: [length // k] * k), timeout=timedelta(seconds=timeout)
    )


def equal_gradients(model: Stage, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(param.grad, expected[name]) for name, param in model.named_parameters())


def gradients(model: Stage) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def sequences_first(data_iterator, model):
    """A forward step on batches [b, n, h], as in Megatron's data sets."""
    return model(next(data_iterator).transpose(0, 1)), sum_of_squares


def in_a_row(world, placement: Placement) -> tuple[list[Stage], list[dict[str, torch.Tensor]]]:
    """The four stages that this rank has, and their gradients where all run here, one after the other."""
    stages = [Stage(configuration(2), number) for number in range(4)]
    total = 0
    for tokens in batches(MICROBATCHES):
        for each in stages:
            tokens = each(tokens)
        total += tokens.square().mean() / MICROBATCHES
    total.backward()
    here = [stages[number] for number in placement.stages_of(world.rank())]
    return here, [gradients(each) for each in here]


def check_groups_of_the_caller(world, alone) -> None:
    """With and without Megatron's communicator: losses and gradients of Megatron's own 1F1B."""
    model = stage(world)
    communicator, collection = P2PCommunicator(world, model.config), groups(world, alone)
    own = forward_backward_pipelining_without_interleaving
    expected = run(own, model, p2p_communicator=communicator, pg_collection=collection)
    expected_gradients = gradients(model)
    for given in ({}, {"p2p_communicator": communicator}):
        assert run(executor(), model, pg_collection=collection, **given) == expected
        assert equal_gradients(model, expected_gradients)
    assert "pg_collection" in raises(ValueError, run, executor(), model, p2p_communicator=communicator)
    other = type("Other", (P2PCommunicator,), {})(world, model.config)
    message = raises(ValueError, run, executor(), model, p2p_communicator=other, pg_collection=collection)
    assert "p2p_communicator" in message


def check_one_rank_without_the_others(world, alone) -> None:
    """Megatron's training loop collects what is not a loss on the last rank only."""
    if world.rank() == 1:
        for forward_only in (True, False):
            run(executor(), stage(alone), pg_collection=groups(alone, alone), forward_only=forward_only)


def check_messages_of_unknown_shape_are_refused(world, alone) -> None:
    model = stage(world)
    model.config.variable_seq_lengths = True
    refusal = raises(ValueError, run, executor(), model, pg_collection=groups(world, alone))
    assert "variable_seq_lengths" in refusal and "fix in advance" in refusal
    message = raises(ValueError, run, executor(), stage(world), pg_collection=groups(world, alone), data_iterator=[])
    assert "1 model chunks need a data iterator each, but 0" in message


def check_a_whole_schedule(world, alone) -> None:
    """Trains on steps of its own shape only, evaluates on any."""
    model, collection = stage(world), groups(world, alone)
    expected = run(executor(), model, pg_collection=collection)
    expected_gradients = gradients(model)
    given = executor(ScheduleChoice.of(build("auto", Shape(Placement(2), MICROBATCHES))))
    assert run(given, model, pg_collection=collection) == expected
    assert equal_gradients(model, expected_gradients)
    with torch.no_grad():
        assert len(run(given, model, microbatches=2, pg_collection=collection, forward_only=True)) in (0, 2)
    assert "3 micro-batches" in raises(ValueError, run, given, model, microbatches=2, pg_collection=collection)


def check_chunks_in_a_v(world, alone) -> None:
    """A whole schedule brings its placement, a name is given one; gradients are those of the stages in a row."""
    placement = Placement(2, 2, "v")
    model, expected = in_a_row(world, placement)
    whole = executor(ScheduleChoice.of(build("zb-h1", Shape(placement, MICROBATCHES))))
    named = executor(ScheduleChoice("1f1b", "v"))
    for given in (whole, named):
        reports = run(given, model, pg_collection=groups(world, alone))
        assert len(reports) == (MICROBATCHES if world.rank() == 0 else 0)
        assert all(equal_gradients(*pair) for pair in zip(model, expected, strict=True))


def check_messages_that_are_used_in_another_order_than_they_were_sent_in(world, alone) -> None:
    """In a schedule of a user's own, rank 1 begins its second chunk before the last unit of its first. Also as on a
    GPU, where the first step is special."""
    placement = Placement(2, 2)
    order = build("breadth-first", Shape(placement, MICROBATCHES, 2))
    second, units = list(order.ranks[1]), 2 * MICROBATCHES
    second[units - 1 : units + 1] = second[units], second[units - 1]
    order = replace(order, ranks=(order.ranks[0], tuple(second)))
    sent, used = (
        [(action.microbatch, action.segment, action.stage // 2) for action in rank if action.kind is Kind.F]
        for rank in order.ranks
    )
    assert sent != used
    model, expected = in_a_row(world, placement)
    for kind in (Communicator, OnDevice):
        given = executor(ScheduleChoice.of(order), k=2)
        with patch.object(executor_file, "Communicator", kind):
            for _ in range(2):
                data = {"data_iterator": [Counted(), Counted()]}
                run(given, model, sequences_first, pg_collection=groups(world, alone), **data)
                assert all(equal_gradients(*pair) for pair in zip(model, expected, strict=True))
    assert OnDevice.turns == 1, "the first step has messages in turn, the second has not"


class OnDevice(Communicator):
    """Messages over gloo that are taken for kernels of a GPU."""

    turns = 0

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.is_on_device = True

    def finish(self):
        OnDevice.turns += self.goes_in_turn
        super().finish()

    def _settle(self) -> None:
        """There is no stream to wait for."""


class Counted:
    """Batches [b, n, h], the sequences first as in Megatron's data sets, and how many were read."""

    def __init__(self) -> None:
        self.read = 0
        self._batches = (tokens.transpose(0, 1) for tokens in batches(100))

    def __next__(self) -> torch.Tensor:
        self.read += 1
        return next(self._batches)


def check_a_rerun_on_rewound_iterators(world, alone) -> None:
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
    model, schedule, counted = stage(world), executor(k=2), Counted()
    iterator, seen = RerunDataIterator(counted), []
    for _ in range(2):
        while get_rerun_state_machine().should_run_forward_backward(iterator):
            given = {"data_iterator": [iterator], "decoder_seq_length": SEQUENCE}
            reports = run(schedule, model, step, pg_collection=groups(world, alone), **given)
            assert len(iterator.saved_microbatches) == MICROBATCHES
            seen.append((reports, gradients(model)))
    destroy_rerun_state_machine()
    first, again, second, _ = seen
    assert first[0] == again[0] and all(torch.equal(first[1][name], again[1][name]) for name in first[1])
    assert len(first[0]) == MICROBATCHES * world.rank()
    assert not torch.equal(first[1]["layers.0.weight"], second[1]["layers.0.weight"])
    assert counted.read == 2 * MICROBATCHES


def check_ranks_that_disagree(world, alone) -> None:
    """All ranks raise, and before the first message."""
    for differing in ({"schedule": ScheduleChoice(("1f1b", "gpipe")[world.rank()])}, {"k": 1 + world.rank()}):
        message = raises(ValueError, run, executor(**differing), stage(world), pg_collection=groups(world, alone))
        assert "rank 1 has" in message and "rank 0 has" not in message, message


def failing_step(world, is_stuck=False):
    """Rank 1 raises in its second call; if it is stuck, rank 0 in its fourth, when nobody has received what it sent."""
    calls, failing = [], (0, 4) if is_stuck else (1, 2)

    def step(data_iterator, model):
        calls.append(None)
        if is_stuck and world.rank() == 1:
            time.sleep(90)
        if (world.rank(), len(calls)) == failing:
            raise KeyError("no more data")
        return forward_step(data_iterator, model)

    return step


def check_failure_of_one_rank(world, alone) -> None:
    """The other ranks fail within the timeout even if the process of the failed one lives on, and no rank of a program
    that catches the error takes another step. Has to be last."""
    kind, step = (KeyError if world.rank() == 1 else RuntimeError), failing_step(world)
    failing, model = executor(timeout=5), stage(world)
    message = raises(kind, run, failing, model, step, pg_collection=groups(world, alone))
    place = "rank 1 failed at 1F1.0, among" if world.rank() == 1 else "rank 0 failed at 0B"
    assert place in message, message
    again = raises(RuntimeError, run, failing, model, pg_collection=groups(world, alone))
    assert f"an earlier step of this pipeline failed ({kind.__name__}: " in again, again


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    alone, _ = dist.new_subgroups(1)
    given = {"pg_collection": groups(world, alone)}
    if "--stuck" in sys.argv:  # rank 0 fails while rank 1 does nothing
        run(
            executor(ScheduleChoice("gpipe"), timeout=600), stage(world), failing_step(world, is_stuck=True), 6, **given
        )
    if "--fail" in sys.argv:  # rank 1 fails, with nobody to catch it
        run(executor(timeout=600), stage(world), failing_step(world), **given)
    run_checks(globals(), world, alone)


if __name__ == "__main__":
    main()
