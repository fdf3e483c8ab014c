"""Steps of programs in the manner of slime and of NeMo-RL, which PyPI does not have, on two pipeline stages of a CPU.

What they are like is from their forward steps and losses of 2026. Both pack rollouts and take log-probabilities from
logits, sequence by sequence:

- slime: an iterator with `get_next(keys)`; packs made in the forward step, padding at their end a document of its own;
  `num_tokens` of 1, and reports of "keys" and "values"; log-probabilities before the steps by `forward_only`.
- NeMo-RL: an iterator of dataclasses, packs made in it, each sequence padded to a multiple; a loss that is called for
  each sequence of a pack and divided by the tokens of the global batch, and returns two values.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn.functional import pad

from frameworks.both_ways import both_ways
from frameworks.equal_steps import Training
from frameworks.live_bytes import LiveBytes
from functional_tests.equality.cases import Layout
from functional_tests.equality.layout import build
from functional_tests.equality.models import VOCABULARY, Model

STEPS, TEMPERATURE = 5, 0.9
# Tokens of prompt and response, in three packs.
PACKS = (((5, 90), (9, 20)), ((12, 60), (6, 33), (3, 7)), ((4, 71), (10, 5), (8, 16)))
NUM_ROLLOUTS = sum(map(len, PACKS))
NUM_TOKENS = sum(response for pack in PACKS for _, response in pack)
MULTIPLE = 8  # of the tokens of a pack, or of a sequence in it
PROGRAMS = ("slime", "nemo-rl")


@dataclass
class ProgramTraining(Training):
    """With log-probabilities from before the steps, by rollout, on the last stage."""

    log_probs: list[Tensor] = field(default_factory=list)


def with_segments_and_without() -> dict[str, tuple[ProgramTraining, ProgramTraining]]:
    """Both programs, by segments of 16 tokens and by Megatron's own schedule."""
    return {name: both_ways(name, partial(train, name), partial(train, name)) for name in PROGRAMS}


def train(program: str) -> ProgramTraining:
    """Five steps."""
    chunks = build(Model(dtype=torch.float32), Layout(pipeline=2))
    config = chunks[0].config
    config.variable_seq_lengths = True
    # Not Adam, whose step for a gradient of rounding errors alone is as long as for any other.
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), chunks)
    config.grad_scale_func = optimizer.scale_loss
    run = partial(
        get_forward_backward_func(),
        model=chunks,
        num_microbatches=len(PACKS),
        seq_length=128,
        micro_batch_size=1,
        decoder_seq_length=128,
    )
    training = ProgramTraining()
    if program == "slime":
        with torch.no_grad():
            reports = run(
                forward_step_func=partial(slime_forward_step, log_probs_of_slime),
                data_iterator=[SlimeIterator(rollouts(0))],
                forward_only=True,
            )
        training.log_probs = [each for report in reports for each in report["log_probs"]]
    memory = LiveBytes()
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        packs = rollouts(step)
        with memory if step == STEPS - 1 else nullcontext():
            if program == "slime":
                reports = run(
                    forward_step_func=partial(slime_forward_step, loss_of_slime),
                    data_iterator=[SlimeIterator(packs)],
                    forward_only=False,
                )
            else:
                reports = run(
                    forward_step_func=nemo_forward_step, data_iterator=nemo_iterator(packs), forward_only=False
                )
        _, norm, _ = optimizer.step()
        training.norms.append(float(norm))
        if reports:
            training.losses.append(float(sum(loss_in_report(report) for report in reports)))
    training.peak_bytes = memory.peak
    return training


def loss_in_report(report: dict) -> float:
    return report["values"][1].item() if "values" in report else sum(report["loss"])


def rollouts(seed: int) -> list[list[dict[str, Tensor]]]:
    """By pack, what a trainer knows of its rollouts: all tokens, and values for those of the response."""
    generator = torch.Generator().manual_seed(seed)
    return [[_rollout(prompt, response, generator) for prompt, response in pack] for pack in PACKS]


def _rollout(prompt: int, response: int, generator: torch.Generator) -> dict[str, Tensor]:
    numbers = partial(torch.randn, response, generator=generator)
    return {
        "tokens": torch.randint(VOCABULARY, (prompt + response,), generator=generator),
        "advantages": numbers(),
        "old_log_probs": -4 + numbers(),
    }


def policy_loss(log_probs: Tensor, rollout: dict[str, Tensor]) -> Tensor:
    """Clipped, of each token of a response."""
    ratio = (log_probs - rollout["old_log_probs"]).exp()
    gains = rollout["advantages"]
    return torch.max(-ratio * gains, -ratio.clamp(0.8, 1.2) * gains)


def log_probs_of(logits: Tensor, rollout: dict[str, Tensor]) -> Tensor:
    """Of the tokens of a response; `logits` [t, vocabulary] are those of the rollout, or more."""
    tokens = rollout["tokens"]
    response = len(rollout["advantages"])
    end = len(tokens)
    of_vocabulary = torch.log_softmax(logits[end - 1 - response : end - 1], dim=-1)
    return of_vocabulary.gather(-1, tokens[-response:, None])[:, 0]


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class SlimeIterator:
    """Has no `__next__`."""

    def __init__(self, packs: list[list[dict[str, Tensor]]]) -> None:
        self._packs = packs
        self._next = 0

    def get_next(self, keys: list[str]) -> dict[str, list[Tensor]]:
        pack = self._packs[self._next]
        self._next += 1
        return {key: [rollout[key] for rollout in pack] for key in keys}


def slime_forward_step(
    loss_func: Callable, iterator: SlimeIterator, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Tensor, Callable]:
    batch = iterator.get_next(["tokens", "advantages", "old_log_probs"])
    lengths = [len(tokens) for tokens in batch["tokens"]]
    padding = -sum(lengths) % MULTIPLE
    if padding:
        lengths.append(padding)
    ends = bounds(lengths)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    output = model(
        input_ids=pad(torch.cat(batch["tokens"]), (0, padding))[None],
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=packed,
    )
    return output, partial(loss_func, batch)


def _slime_log_probs(batch: dict[str, list[Tensor]], logits: Tensor) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """With the rollout of each."""
    logits = logits.squeeze(0).float().div(TEMPERATURE)
    found = []
    start = 0
    for values in zip(*batch.values(), strict=True):
        rollout = dict(zip(batch, values, strict=True))
        found.append((log_probs_of(logits[start:], rollout), rollout))
        start += len(rollout["tokens"])
    return found


def log_probs_of_slime(batch: dict[str, list[Tensor]], logits: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]]:
    return torch.empty(0), {"log_probs": [log_probs for log_probs, _ in _slime_log_probs(batch, logits)]}


def loss_of_slime(batch: dict[str, list[Tensor]], logits: Tensor) -> tuple[Tensor, Tensor, dict]:
    """The sum of the means of rollouts."""
    pairs = _slime_log_probs(batch, logits)
    loss = sum(policy_loss(log_probs, rollout).mean() for log_probs, rollout in pairs)
    report = {"keys": ["loss"], "values": torch.stack([torch.tensor(float(len(pairs))), loss.detach()])}
    return loss * len(PACKS) / NUM_ROLLOUTS, torch.tensor(1), report


class BatchedData(UserDict):
    """No mapping that PyTorch knows."""


@dataclass
class ProcessedMicrobatch:
    data: BatchedData
    input_ids: Tensor
    packed_seq_params: PackedSeqParams
    starts: list[int]


def nemo_iterator(packs: list[list[dict[str, Tensor]]]) -> Iterator[ProcessedMicrobatch]:
    for pack in packs:
        padded = [pad(rollout["tokens"], (0, -len(rollout["tokens"]) % MULTIPLE)) for rollout in pack]
        ends = bounds([len(tokens) for tokens in padded])
        longest = max(len(tokens) for tokens in padded)
        yield ProcessedMicrobatch(
            data=BatchedData(rollouts=pack),
            input_ids=torch.cat(padded)[None],
            packed_seq_params=PackedSeqParams("thd", ends, ends, ends, ends, longest, longest),
            starts=ends[:-1].tolist(),
        )


def nemo_forward_step(iterator: Iterator[ProcessedMicrobatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
    microbatch = next(iterator)
    output = model(
        input_ids=microbatch.input_ids,
        position_ids=None,
        attention_mask=None,
        packed_seq_params=microbatch.packed_seq_params,
    )
    return output, partial(loss_of_nemo, microbatch)


def loss_of_nemo(microbatch: ProcessedMicrobatch, logits: Tensor) -> tuple[Tensor, dict[str, list[float]]]:
    """The mean over the tokens of the global batch, which Megatron divides by the number of packs."""
    losses = []
    for start, rollout in zip(microbatch.starts, microbatch.data["rollouts"], strict=True):
        of_sequence = logits[0, start:].float() / TEMPERATURE
        losses.append(policy_loss(log_probs_of(of_sequence, rollout), rollout).sum() / NUM_TOKENS)
    return sum(losses) * len(PACKS), {"loss": [loss.item() for loss in losses]}
