"""Layered gradient accumulation and the modular pipeline (arXiv 2106.02679) with the costs of this package.

Our own derivation: the paper's tables could not be obtained. Its argument is that the shortest time to train is bound
by the critical batch size. Devices beyond those that data parallelism can use go into the pipeline, where few
micro-batches are left for each, so that 1F1B idles and exchanges gradients when all are through. All units of a layer
before the next (`breadth-first`) with many chunks on a rank shrinks the bubble, and spreads the exchange over the step.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log2

from msgspec import structs

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.commands.train_time import LAWS, Training, soonest
from megatron.seq1f1b.costs.blocks import parameters_of_model
from megatron.seq1f1b.costs.machine import Machine, read_machine
from megatron.seq1f1b.costs.simulator import Prediction, predict
from megatron.seq1f1b.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planner.space import Candidate, Question

MODEL = "gpt-1t"
TOKENS = 450e9  # arXiv 2104.04473, section 5: 450 billion tokens for 1T
LENGTH = 2048
COUNTS = (16384, 65536)
PARTITIONED = "modular pipeline, state partitioned"
METHODS: dict[str, Callable[[TrainingSetup], bool]] = {
    "1F1B": lambda setup: setup.family == "1f1b" and setup.placement.num_chunks == 1,
    "interleaved 1F1B": lambda setup: setup.family == "1f1b",
    "modular pipeline": lambda setup: setup.family == "breadth-first" and setup.placement.num_chunks > 1,
    PARTITIONED: lambda setup: setup.partitions_state and setup.family == "breadth-first",
}


@dataclass(frozen=True)
class Case:
    """The days of the soonest training by a method on a number of devices, and its plan; None where nothing fits."""

    network: str
    method: str
    devices: int
    soonest: Training | None


def networks() -> dict[str, Machine]:
    """InfiniBand as in DGX A100, and nodes with one Ethernet adapter of 100 Gbit/s."""
    machine = read_machine("a100-80gb")
    slow = structs.replace(machine.network, bandwidth=11e9, message_bandwidth=11e9, latency=50e-6)
    return {"8 x 200 Gbit/s": machine, "100 Gbit/s": replace(machine, network=slow)}


def cases(progress: Callable[[str], None] = lambda text: None) -> Iterator[Case]:
    model = preset(MODEL)
    law = LAWS["noise-scale"]
    largest = law.largest(parameters_of_model(model), TOKENS)
    for network, machine in networks().items():
        for method, is_its in METHODS.items():
            question = Question(
                model=model,
                machine=machine,
                num_devices=COUNTS[-1],
                sequence_length=LENGTH,
                global_batch_size=1,
                families=("breadth-first",) if method == PARTITIONED else ("1f1b", "breadth-first"),
                segments=(1,),
                chunks=(1, 2, 4, 8, 16),
                micro_batches=(1,),
                partitions_state=method == PARTITIONED,
            )

            def accept(candidate: Candidate, is_its: Callable[[TrainingSetup], bool] = is_its) -> bool:
                setup = candidate.setup
                return is_its(setup) and setup.tensor_parallel == 8 and setup.pipeline_parallel > 1

            for devices in COUNTS:
                asked = replace(question, num_devices=devices, accepts=accept)
                training = soonest(asked, TOKENS, law, largest, shares=(1.0,))
                progress(f"{network}, {method}, {devices}: {training and training.days}\n")
                yield Case(
                    network=network,
                    method=method,
                    devices=devices,
                    soonest=training,
                )


def slowest_network(setup: TrainingSetup, machine: Machine) -> float:
    """The bandwidth of a node, in GB/s, below which a step takes 10 % longer than on this machine."""
    allowed = 1.1 * predict(setup, machine).seconds

    def is_slow(tenths: int) -> bool:
        bandwidth = 1e9 * 2 ** (tenths / 10)
        link = structs.replace(
            machine.network, bandwidth=bandwidth, message_bandwidth=min(machine.network.message_bandwidth, bandwidth)
        )
        return predict(setup, replace(machine, network=link)).seconds > allowed

    most = int(10 * log2(machine.network.bandwidth / 1e9))
    return float(2 ** (bisect_left(range(most), True, key=lambda tenths: not is_slow(tenths)) / 10))


def state_gib(prediction: Prediction) -> float:
    """Weights, gradients and state of the optimizer on the fullest rank."""
    return max(rank.weights + rank.gradients + rank.optimizer for rank in prediction.memory) / 2**30


def markdown(found: list[Case]) -> list[str]:
    lines = [
        "| network of a node | GPUs | method | days | to 1F1B | GPU hours | PP, DP, C, m | bubble ratio | GiB | "
        "of state | 10 % longer below |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    machines = networks()
    fastest, *_ = machines.values()
    plain = {(case.network, case.devices): case.soonest for case in found if case.method == "1F1B"}
    for case in sorted(found, key=lambda case: (list(machines).index(case.network), case.devices)):
        head = f"| {case.network} | {case.devices} | {case.method} |"
        if case.soonest is None:
            lines.append(f"{head} does not fit | | | | | | | |")
            continue
        days, plan = case.soonest
        setup = plan.candidate.setup
        base = plain[case.network, case.devices]
        ratio = "-" if base is None else f"{days / base.days:.2f}"
        sizes = (setup.pipeline_parallel, setup.data_parallel, setup.placement.num_chunks, setup.num_microbatches)
        bubble = (setup.pipeline_parallel - 1) / setup.placement.num_chunks  # in micro-batches
        bubble_ratio = bubble / (setup.num_microbatches + bubble)
        lines.append(
            f"{head} {days:.3g} | {ratio} | {24 * days * setup.num_devices:.3g} | "
            f"{', '.join(map(str, sizes))} | "
            f"{100 * bubble_ratio:.0f} % | {plan.memory_gib:.0f} | {state_gib(predict(setup, fastest)):.1f} | "
            f"{slowest_network(setup, fastest):.0f} GB/s |"
        )
    return lines


def findings(found: list[Case]) -> list[str]:
    """What the table comes to, beside what the paper claims."""
    lines = []
    soonest_of = {}
    for network in networks():
        for method in METHODS:
            of_method = (case.soonest for case in found if (case.network, case.method) == (network, method))
            days = min((training.days for training in of_method if training), default=None)
            soonest_of[network, method] = days
        plain, interleaved, *layered = (soonest_of[network, method] for method in METHODS)
        if plain is None or interleaved is None or None in layered:
            continue
        modular, partitioned = layered
        lines.append(
            f"- Nodes with {network}: the shortest training takes {plain:.3g} days with 1F1B, {interleaved:.3g} "
            f"interleaved, {modular:.3g} with the modular pipeline and {partitioned:.3g} with its state partitioned, "
            f"{modular / plain:.2f} and {partitioned / plain:.2f} of 1F1B (claimed: a half)."
        )
    fast, slow = ([soonest_of[network, method] for method in METHODS] for network in networks())
    if None not in (*fast, *slow):
        ratios = ", ".join(f"{of_slow / of_fast:.2f}" for of_fast, of_slow in zip(fast, slow, strict=True))
        lines.append(f"- On the slow network the four take {ratios} times as long as on InfiniBand.")
    return lines
