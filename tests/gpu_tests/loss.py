"""The loss of the last stage in pieces of tokens, beside the whole one, at a vocabulary of 128k."""

from gpu_tests.common import GIB, Report, dtype_of, seconds  # before Megatron

# isort: split
import argparse
from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from functional_tests.equality.models import Model
from megatron.seq1f1b.model import PIECE, compute_loss_in_pieces

# Tokens, hidden size, vocabulary.
SIZES, TINY = (32768, 4096, 131072), (64, 32, 512)
SPLITS = (1, 4, 8)
GRADIENT_TOLERANCE = 1e-2  # of gradients in bf16, relative


def last_stage(hidden: int, vocabulary: int, length: int, device: str) -> GPTModel:
    """Without layers: the projection to the vocabulary, and the loss."""
    dtype = dtype_of(device)
    widths = {"hidden_size": hidden, "kv_channels": hidden // 2, "bf16": dtype is torch.bfloat16}
    config = Model(dtype, layers=1, heads=2, kv_heads=2).but(**widths).transformer_config()
    model = GPTModel(config, get_gpt_layer_local_spec(), vocabulary, length, pre_process=False)
    model.decoder = torch.nn.Identity()
    return model.to(device, dtype)


def step(model: GPTModel, hidden: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> float:
    """The loss of a micro-batch: all its segments go forward, then backward."""
    losses = []
    for part, answers in zip(hidden, labels, strict=True):
        logits, _ = model.output_layer(part)
        losses.append(model.compute_language_model_loss(answers, logits).sum())
        del logits
    total = sum(loss.detach() for loss in losses)
    while losses:
        losses.pop().backward()
    return float(total)


def whole_and_in_pieces(report: Report, args: argparse.Namespace) -> None:
    tokens, width, vocabulary = TINY if args.tiny else SIZES
    piece = tokens * vocabulary // 16 if args.tiny else PIECE
    model = last_stage(width, vocabulary, tokens, args.device)
    hidden = torch.randn(tokens, 1, width, device=args.device, dtype=dtype_of(args.device))
    labels = torch.randint(vocabulary, (1, tokens), device=args.device)
    for k in SPLITS:
        found = {}
        for name, size in (("whole", None), ("in pieces", piece)):
            compute_loss_in_pieces([model], tokens, size)
            parts = [part.clone().requires_grad_() for part in hidden.chunk(k)]
            run = partial(step, model, parts, labels.chunk(k, dim=1))
            try:
                for _ in range(2):  # the first warms up
                    model.zero_grad()
                    torch.cuda.reset_peak_memory_stats()
                    allocated = torch.cuda.memory_allocated()
                    took, loss = seconds(args.device, run)
            except torch.OutOfMemoryError:
                report.figure("loss", segments=k, loss=name, out_of_memory=True)
                continue
            peak = torch.cuda.max_memory_allocated() - allocated
            report.figure(
                "loss",
                tokens=tokens,
                hidden=width,
                vocabulary=vocabulary,
                segments=k,
                loss=name,
                seconds=took,
                peak_gib=peak / GIB,
            )
            found[name] = loss, peak, model.output_layer.weight.grad
        if len(found) == 2:
            compare(report, f"a vocabulary of {vocabulary}, {k} segments", *found.values(), is_judged=not args.tiny)


def compare(
    report: Report,
    what: str,
    whole: tuple[float, int, torch.Tensor],
    in_pieces: tuple[float, int, torch.Tensor],
    is_judged: bool,
) -> None:
    """Losses, peaks and gradients of the projection."""
    (own, own_peak, own_gradient), (ours, peak, gradient) = whole, in_pieces
    apart = abs(ours - own) / abs(own)
    gradients_apart = ((gradient - own_gradient).norm() / own_gradient.norm()).item()
    report.check(
        f"the loss in pieces, {what}: the loss and its gradient are those of the whole",
        apart < 1e-5 and gradients_apart < GRADIENT_TOLERANCE,
        f"{apart:.1e} and {gradients_apart:.1e} apart",
    )
    ratio = peak / max(own_peak, 1)
    name = f"the loss in pieces, {what}: at most half of the memory"
    report.check(name, ratio <= 0.5 if is_judged else None, f"{ratio:.2f} of it")
