"""The loss of the last stage side by side: logits kept, in pieces, and in Megatron's fused cross entropy.

    python tools/benchmark_loss.py --seq-length 4096 --sequence-splits 4

All segments of a sequence go forward, then backward, as under Seq1F1B. The memory is that at its highest, without
parameters, counted by storages; where PyTorch compiles a kernel, what it allocates inside is not counted. Times are
medians of rounds in turn, beside the ratio to kept logits in the same round.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarking.allocated import Allocated  # noqa: E402
from megatron.seq1f1b import cpu  # noqa: E402

cpu.activate()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.seq1f1b.model import compute_loss_in_pieces  # noqa: E402

VARIANTS = ("kept", "in pieces", "kept, fused", "in pieces, fused")


def build(args: argparse.Namespace, is_fused: bool) -> GPTModel:
    """A last stage without layers."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden_size,
        num_attention_heads=1,
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--sequence-splits", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--piece", type=int, default=2**24, help="logits of a piece; training takes 2^26")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)

    hidden = torch.randn(args.seq_length, 1, args.hidden_size).chunk(args.sequence_splits)
    labels = torch.randint(args.vocab_size, (1, args.seq_length)).chunk(args.sequence_splits, dim=1)
    inputs = [part.clone().requires_grad_() for part in hidden]
    models, peaks, seconds = {}, {}, {name: [] for name in VARIANTS}
    for name in VARIANTS:
        models[name] = build(args, name.endswith("fused"))
        compute_loss_in_pieces([models[name]], 2**40, args.piece if "pieces" in name else None)
    for number in range(args.repeats + 1):
        for name, model in models.items():
            model.zero_grad()
            start = time.perf_counter()
            if number == 0:  # which warms up
                with Allocated([*model.parameters(), *inputs, *labels]) as allocated:
                    step(model, inputs, labels)
                peaks[name] = allocated.peak
            else:
                step(model, inputs, labels)
                seconds[name].append(time.perf_counter() - start)

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
