"""Starts training scripts, each with its flags, in one process, up to the point where training would begin.

The first argument is a JSON file of rows (script, number of ranks, flags); exit codes and what was printed are written
beside it.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import traceback
from pathlib import Path

from megatron.training import global_vars

import pretrain_gpt
import pretrain_hybrid

MAIN = {
    "gpt": (pretrain_gpt.gpt_config_from_args, {"hybrid_layer_pattern": "makes a hybrid model"}),
    "hybrid": (pretrain_hybrid.hybrid_config, {}),
}


def start(script: str, num_ranks: int, flags: list[str]) -> tuple[int, str]:
    """The exit code and what was printed by rank 0 of `num_ranks`; 0 if training would begin."""
    os.environ["WORLD_SIZE"] = str(num_ranks)
    sys.argv = ["pretrain_gpt.py", *flags]
    printed = io.StringIO()
    logging.basicConfig(stream=printed, format="%(message)s", force=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            pretrain_gpt.main(*MAIN[script])
        except SystemExit as end:
            return end.code, printed.getvalue()
        except Exception:
            return 1, printed.getvalue() + traceback.format_exc()
        finally:
            global_vars.unset_global_variables()
    return 0, printed.getvalue()


def without_library(args: argparse.Namespace) -> None:
    """Null tokenizers import libraries, too, which takes seconds."""
    if args.tokenizer_type == "NullTokenizer":
        args.padded_vocab_size = 128
    else:
        build_tokenizer(args)


if __name__ == "__main__":
    pretrain_gpt.pretrain = lambda *args, **kwargs: None
    build_tokenizer, global_vars._build_tokenizer = global_vars._build_tokenizer, without_library
    path = Path(sys.argv[1])
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(path.with_name("error.json"))
    starts = json.loads(path.read_text())
    path.with_name("ended.json").write_text(json.dumps([start(*each) for each in starts]))
