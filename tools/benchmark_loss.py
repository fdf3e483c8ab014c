"""The loss of the last stage side by side: logits kept, in pieces, and in Megatron's fused cross entropy.

    python tools/benchmark_loss.py --seq-length 4096 --sequence-splits 4

All segments of a sequence go forward, then backward, as under Seq1F1B. The memory is that at its highest, without
parameters, counted by storages; where PyTorch compiles a kernel, what it allocates inside is not counted. Times are
medians of rounds in turn, beside the ratio to kept logits in the same round.
"""

from benchmarking.device import parser_of, start  # before Megatron

# isort: split
import argparse
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarking.model import counted_beside, use_ranks
from megatron.seq1f1b.model import compute_loss_in_pieces

VARIANTS = ("kept", "in pieces", "kept, fused", "in pieces, fused")


def build(args: argparse.Namespace, is_fused: bool) -> GPTModel:
    """A last stage without layers."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=is_fused,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), args.vocab_size, args.seq_length, pre_process=False)
    model.decoder = torch.nn.Identity()
    return model


def step(model: GPTModel, hidden: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
    losses = []
    for part, answers in zip(hidden, labels, strict=True):
        logits, _ = model.output_layer(part)
        losses.append(model.compute_language_model_loss(answers, logits).sum())
        del logits
    while losses:
        losses.pop().backward()


def main() -> None:
    parser = parser_of(__doc__, num_layers=1, num_attention_heads=1, vocab_size=32768)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--sequence-splits", type=int, default=4)
    parser.add_argument("--piece", type=int, default=2**24, help="logits of a piece; training takes 2^26")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start()
    use_ranks(1)

    hidden = torch.randn(args.seq_length, 1, args.hidden_size).chunk(args.sequence_splits)
    labels = torch.randint(args.vocab_size, (1, args.seq_length)).chunk(args.sequence_splits, dim=1)
    inputs = [part.clone().requires_grad_() for part in hidden]
    models = {}
    peaks = {}
    seconds = {name: [] for name in VARIANTS}
    for name in VARIANTS:
        models[name] = build(args, name.endswith("fused"))
        compute_loss_in_pieces([models[name]], 2**40, args.piece if "pieces" in name else None)
    for number in range(args.repeats + 1):
        for name, model in models.items():
            model.zero_grad()
            began = time.perf_counter()
            if number == 0:  # which warms up
                with counted_beside([*model.parameters(), *inputs, *labels]) as ledger:
                    step(model, inputs, labels)
                peaks[name] = ledger.moments()[0].peak_bytes
            else:
                step(model, inputs, labels)
                seconds[name].append(time.perf_counter() - began)

    print(
        f"{args.seq_length} tokens in {args.sequence_splits} segments, {args.vocab_size} words, hidden "
        f"{args.hidden_size}, fp32, pieces of {args.piece // args.vocab_size} tokens"
    )
    print(f"{'logits':20}{'peak MiB':>10}{'s/step':>9}{'ratio':>8}")
    for name in VARIANTS:
        ratio = statistics.median(one / kept for one, kept in zip(seconds[name], seconds["kept"], strict=True))
        print(f"{name:20}{peaks[name] / 2**20:10.0f}{statistics.median(seconds[name]):9.2f}{ratio:8.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
