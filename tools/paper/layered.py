"""Layered gradient accumulation and the modular pipeline (arXiv 2106.02679) with the costs of this package.

Our own derivation: the paper's tables could not be obtained. Its argument is that the shortest time to train is bound
by the critical batch size. Devices beyond those that data parallelism can use go into the pipeline, where few
micro-batches are left for each, so that 1F1B idles and exchanges gradients when all are through. All units of a layer
before the next (`breadth-first`) with many chunks on a rank shrinks the bubble, and spreads the exchange over the step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron.seq1f1b.commands.model_flags import preset
from megatron.seq1f1b.planning.costs.machine import Machine, read_machine
from megatron.seq1f1b.planning.costs.training_setup import TrainingSetup
from megatron.seq1f1b.planning.planner import LAWS, Candidate, Question, Training, soonest

MODEL, TOKENS, LENGTH = "gpt-1t", 450e9, 2048  # arXiv 2104.04473, section 5: 450 billion tokens for 1T
COUNTS = (16384, 65536)
METHODS: dict[str, Callable[[TrainingSetup], bool]] = {
    "1F1B": lambda setup: setup.family == "1f1b" and setup.placement.num_chunks == 1,
    "interleaved 1F1B": lambda setup: setup.family == "1f1b",
    "modular pipeline": lambda setup: setup.family == "breadth-first" and setup.placement.num_chunks > 1,
}


@dataclass(frozen=True)
class Case:
    """The soonest training by a method on a number of devices; None where nothing fits."""

    network: str
    method: str
    devices: int
    training: Training | None


def networks() -> dict[str, Machine]:
    """InfiniBand as in DGX A100, and nodes with one Ethernet adapter of 100 Gbit/s."""
    machine = read_machine("a100-80gb")
    slow = replace(machine.network, bandwidth=11e9, message_bandwidth=11e9, latency=50e-6)
    return {"8 x 200 Gbit/s": machine, "100 Gbit/s": replace(machine, network=slow)}


def cases(progress: Callable[[str], None] = lambda text: None) -> Iterator[Case]:
    for network, machine in networks().items():
        for method, is_its in METHODS.items():
            question = Question(
                preset(MODEL),
                machine,
                COUNTS[-1],
                LENGTH,
                1,
                families=("1f1b", "breadth-first"),
                segments=(1,),
                chunks=(1, 2, 4, 8, 16),
                micro_batches=(1,),
            )

            def accept(candidate: Candidate, is_its: Callable[[TrainingSetup], bool] = is_its) -> bool:
                setup = candidate.setup
                return is_its(setup) and setup.tensor_parallel == 8 and setup.pipeline_parallel > 1

            for devices in COUNTS:
                asked = replace(question, num_devices=devices)
                training = soonest(asked, TOKENS, LAWS["noise-scale"], shares=(1.0,), accept=accept)
                progress(f"{network}, {method}, {devices}: {training and training.days}\n")
                yield Case(network, method, devices, training)


def sharded_gib(training: Training) -> float:
    """GiB of weights, gradients and state where data parallelism also shards the weights: every chunk is gathered once
    a step and its gradients are reduced once, so only the chunk at work and the next one are whole."""
    setup = training.candidate.setup
    of_rank = [
        [setup.stage_parameters(stage) for stage in setup.placement.stages_of(rank)]
        for rank in range(setup.pipeline_parallel)
    ]
    fullest = max(of_rank, key=sum)
    shards = sum(fullest) * (2 + setup.gradient_bytes + 12) / setup.data_group.size
    return (shards + min(2, len(fullest)) * max(fullest) * (2 + setup.gradient_bytes)) / 2**30


def markdown(found: list[Case]) -> list[str]:
    lines = [
        "| network of a node | GPUs | method | days | to 1F1B | GPU hours | PP, DP, C, m | without bubble | GiB | "
        "GiB of sharded state |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    plain = {(each.network, each.devices): each.training for each in found if each.method == "1F1B"}
    for each in sorted(found, key=lambda case: (list(networks()).index(case.network), case.devices)):
        head = f"| {each.network} | {each.devices} | {each.method} |"
        if each.training is None:
            lines.append(f"{head} does not fit | | | | | | |")
            continue
        training, setup = each.training, each.training.candidate.setup
        base = plain[each.network, each.devices]
        ratio = "-" if base is None else f"{training.days / base.days:.2f}"
        sizes = (setup.pipeline_parallel, setup.data_parallel, setup.placement.num_chunks, setup.num_microbatches)
        ideal = setup.num_microbatches / (
            setup.num_microbatches + (setup.pipeline_parallel - 1) / setup.placement.num_chunks
        )
        lines.append(
            f"{head} {training.days:.3g} | {ratio} | {training.device_hours:.3g} | {', '.join(map(str, sizes))} | "
            f"{100 * ideal:.0f} % | {training.memory_gib:.0f} | {sharded_gib(training):.1f} |"
        )
    return lines


def findings(found: list[Case]) -> list[str]:
    """What the table comes to, beside what the paper claims."""
    lines = []
    for network in networks():
        days = {
            method: min(
                (
                    each.training.days
                    for each in found
                    if (each.network, each.method) == (network, method) and each.training
                ),
                default=None,
            )
            for method in METHODS
        }
        if None in days.values():
            continue
        plain, modular = days["1F1B"], days["modular pipeline"]
        lines.append(
            f"- Nodes with {network}: the shortest training takes {plain:.3g} days with 1F1B, "
            f"{days['interleaved 1F1B']:.3g} interleaved and {modular:.3g} with the modular pipeline, "
            f"{modular / plain:.2f} of 1F1B (claimed: a half)."
        )
    best = [
        min(
            (
                each.training.days
                for each in found
                if each.network == network and each.method == "modular pipeline" and each.training
            ),
            default=None,
        )
        for network in networks()
    ]
    if None not in best:
        lines.append(
            f"- On the slow network the modular pipeline takes {best[1] / best[0]:.2f} times as long as on InfiniBand."
        )
    return lines
