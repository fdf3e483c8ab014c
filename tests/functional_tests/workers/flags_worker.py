"""Prints what Megatron's parser and our validation make of launches: each argument is JSON, with `flags` and an
`environment`."""

import argparse
import json
import os
import sys
import traceback

import megatron.seq1f1b

JOBS = [json.loads(job) for job in sys.argv[1:]]
sys.argv[1:] = ["--device", "cpu"]
megatron.seq1f1b.install()

from megatron.training.arguments import add_megatron_arguments, parse_args, validate_args  # noqa: E402

from megatron.seq1f1b import add_arguments, validate  # noqa: E402
from megatron.seq1f1b.cpu.upstream import FLAGS  # noqa: E402

NAMES = [
    *("num_layers", "hidden_size", "vocab_size", "bf16", "sequence_parallel", "data_parallel_size", "manual_gc", "lr"),
    *("global_batch_size", "transformer_impl", "gradient_accumulation_fusion", "masked_softmax_fusion"),
    "no_persist_layer_norm",
]
OF_GPUS = {name for name, _, _ in FLAGS}  # replaced on a CPU, where this runs


def seen(parser: argparse.ArgumentParser, flags: list[str]) -> dict:
    sys.argv[1:] = flags
    try:
        args = parse_args(add_arguments)
        validate_args(args)
        args.padded_vocab_size = args.vocab_size
        config = validate(args)
        asked = vars(parser.parse_args(flags))
        found = {name: asked[name] if name in OF_GPUS else getattr(args, name) for name in NAMES}
        cut = config.cut(args.seq_length) if config.schedule is not None else None
        return found | {"attention_backend": args.attention_backend.name, "cut": cut}
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    for job in JOBS:
        os.environ.update(job["environment"])
        print("SEEN", json.dumps(seen(parser, job["flags"])), flush=True)
