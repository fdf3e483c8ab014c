"""TeraPipe (arXiv 2102.07988): latencies of its settings on V100, with and without slices of sequences."""

import re
from collections.abc import Iterator

from megatron.seq1f1b.costs.machine import Machine, read_machine
from megatron.seq1f1b.costs.training_setup import Software, TrainingSetup
from megatron.seq1f1b.partition import even
from megatron.seq1f1b.planner.presets import gpt
from megatron.seq1f1b.schedule import Placement
from megatron.seq1f1b.simulator import predict

from .row import Row, read

# The authors' model is the layers alone, without embedding and vocabulary; gradients take four bytes (memory_model.py).
_SOFTWARE = Software(flash_attention=False, overlaps_messages=False, overlaps_tensor_parallel=False)
# Numbers of slices that are tried where none are known.
SLICES = (1, 2, 4, 8, 16, 32)


def setup_of(setting: dict[str, str], slices: tuple[int, ...]) -> TrainingSetup:
    pipeline = int(setting["pipeline_parallel"])
    return TrainingSetup(
        model=gpt(int(setting["layers"]), int(setting["hidden"]), int(setting["heads"]), 0),
        sequence_length=int(setting["seqlen"]),
        num_microbatches=int(setting["batch_per_replica"]),
        tensor_parallel=int(setting["op_parallel"]),
        data_parallel=int(setting["data_parallel"]),
        placement=Placement(pipeline),
        pipeline_before_data=True,
        family="gpipe",
        segments=slices,
        software=_SOFTWARE,
    )


def best_slices(setting: dict[str, str], machine: Machine) -> tuple[int, ...]:
    """Equal slices, as many as make the shortest step."""
    cuts = [even(int(setting["seqlen"]), count) for count in SLICES]
    return min(cuts, key=lambda cut: predict(setup_of(setting, cut), machine).seconds)


def gains() -> Iterator[Row]:
    """How many times faster a step is with slices."""
    of_setting: dict[str, list[Row]] = {}
    for row in latencies():
        of_setting.setdefault(row.group, []).append(row)
    for group, rows in of_setting.items():
        if len(rows) == 2:
            published, predicted = (
                getattr(rows[0], name) / getattr(rows[1], name) for name in ("published", "predicted")
            )
            yield Row("TeraPipe, gain of slices", group, "times", published, predicted)


def latencies() -> Iterator[Row]:
    machine = read_machine("v100-p3")
    settings = {row["setting"]: row for row in read("terapipe_settings")}
    for row in read("terapipe_latency_main"):
        setting = settings[row["setting"]]
        scheme = re.search(r"\(1,\s*\[([\d,\s]+)\]\)", row["slicing_scheme"])
        slices = tuple(map(int, scheme[1].split(","))) if scheme else (int(setting["seqlen"]),)
        # The source omits the slices of setting 1 with TeraPipe, which chooses them by a model of its costs, as we do.
        if not scheme and row["algorithm"] == "w/ TeraPipe":
            slices = best_slices(setting, machine)
        setup = setup_of(setting, slices)
        yield Row(
            "TeraPipe latencies",
            f"setting {row['setting']}, {row['model']}, {row['algorithm']}",
            "s",
            float(row["latency_s"]),
            predict(setup, machine).seconds,
            group=f"setting {row['setting']}",
            setup=setup,
            machine=machine,
        )
