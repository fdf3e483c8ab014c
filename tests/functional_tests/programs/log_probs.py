"""A program that takes log-probabilities and entropies from logits, in pieces where it gets such, else by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

import megatron.seq1f1b
from functional_tests.equality.cases import Layout
from functional_tests.equality.comparison import patches_of
from functional_tests.programs.comparison import PIPELINE, PLAIN, SPLIT, TENSOR, Setting, compare, in_words, options
from functional_tests.programs.program import Program, unwrapped
from megatron.seq1f1b.launch import executors
from megatron.seq1f1b.model import PieceLogits
from megatron.seq1f1b.process.patches import patched

TEMPERATURE = 0.7
PIECE = 100  # logits, of a few tokens

TIED = PLAIN.but(tied=True)
SETTINGS = {
    "pp2": Setting(PLAIN, PIPELINE),
    "pp2-tied": Setting(TIED, PIPELINE),
    "pp2-zb-h1": Setting(PLAIN, PIPELINE, SPLIT),
    "pp2-whole": Setting(PLAIN, PIPELINE, options(sequence_splits="1")),
    "pp1-tied": Setting(TIED, Layout()),
    "tp2": Setting(PLAIN, Layout(tensor=2)),
    "tp2-sp-tied": Setting(TIED, TENSOR),
}


@dataclass(frozen=True)
class LogProbsProgram(Program):
    """Rows of two sequences. With `reads_logits` it changes the logits in place, and computes with all of them."""

    reads_logits: bool = False

    def forward_step(self, num_tokens: float) -> Callable:
        return partial(_forward_step, self)


def run_programs(reads_logits: bool) -> None:
    """The program in each setting; rank 0 prints a line for each."""
    for name, setting in SETTINGS.items():
        program = LogProbsProgram("dict", "rows", "logits", "", "", 2, True, len(name), reads_logits)
        # The usual piece is larger than these logits.
        with patched(patches_of(setting.model)), mock.patch.object(executors, "PIECE", PIECE):
            errors = compare(program, setting)
        of_ranks: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, errors)
        if dist.get_rank() == 0:
            print(f"program {name}: {in_words(of_ranks)}", flush=True)


def _forward_step(program: LogProbsProgram, iterator: object, model: torch.nn.Module) -> tuple:
    sequences = next(iterator)["sequences"]
    tokens, advantages = (torch.stack([each[name] for each in sequences]) for name in ("tokens", "advantages"))
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    logits = model(tokens, torch.arange(length).expand(len(tokens), -1), mask)
    if not unwrapped(model).post_process:
        return logits, None
    is_in_pieces = isinstance(logits, PieceLogits)
    if is_in_pieces and not program.reads_logits:
        log_probs, entropy = megatron.seq1f1b.token_log_probs_and_entropy(logits, tokens.roll(-1, 1), TEMPERATURE)
        assert not logits.is_whole
    else:
        logits.div_(TEMPERATURE)
        whole = torch.log_softmax(gather_from_tensor_model_parallel_region(logits), dim=-1)
        log_probs = whole.gather(-1, tokens.roll(-1, 1)[..., None])[..., 0]
        entropy = -(whole.exp() * whole).sum(-1)
    return logits, partial(_loss, is_in_pieces, log_probs[:, :-1] * advantages[:, 1:], entropy)


def _loss(is_in_pieces: bool, gains: Tensor, entropy: Tensor, _: Tensor) -> tuple:
    loss = -gains.mean() - 0.1 * entropy.square().mean()
    if is_in_pieces:
        print("in pieces", flush=True)
    return loss, {"loss": loss.detach().clone(), "entropy": entropy.detach().mean()}
