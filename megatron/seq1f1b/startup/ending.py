"""How a rank ends that cannot go on: with one sentence on the screen and in torchrun's report."""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from .. import ranks
from ..arguments import Naming

# The launcher ends all ranks as soon as one is gone, so the others wait until rank 0 has printed the reason.
_SECONDS_FOR_RANK_0 = 20

# Set to 1, it shows where a sentence comes from.
TRACEBACK_VARIABLE = "SEQ1F1B_TRACEBACK"


def end(sentence: str, error: BaseException | None = None) -> NoReturn:
    """Print one sentence, given without its full stop, and exit with code 2; to be called where no work is under way.

    All ranks may call it: the one of rank 0 is seen. A rank that failed alone is heard after a while. `error` is what
    the sentence is about; its traceback is printed if `SEQ1F1B_TRACEBACK` is set.
    """
    sentence = f"{sentence.strip().rstrip('.')}."
    record(sentence)
    rank = ranks.rank()
    if rank > 0:
        time.sleep(_SECONDS_FOR_RANK_0)
        sentence = f"(rank {rank} on {socket.gethostname()}) {sentence}"
    if error is not None and wants_tracebacks():
        traceback.print_exception(error)
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def wants_tracebacks() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")


@contextmanager
def failures_recorded() -> Iterator[None]:
    """Around a whole training script: what ends it is in torchrun's report, which takes the earliest for the cause.

    Our own ValueErrors, such as those of a first step that finds a model unfit for segments, end it with a sentence.
    """
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        if isinstance(error, ValueError) and _is_ours(error):
            end(Naming.FLAGS.sentence(error), error)
        record("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
        raise


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised by code of this package, not by the script's or Megatron's on our call."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").startswith(f"{__package__.rpartition('.')[0]}.")


def record(message: str) -> None:
    """Leave a message for torchrun, in the form of torch.distributed.elastic.multiprocessing.errors."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        with open(path, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}, file)
    except OSError:
        pass  # the sentence is on the screen, too
