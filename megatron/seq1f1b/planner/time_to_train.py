"""How long a whole training takes when the batch must stay below the critical one.

Below the critical batch size more samples a step mean fewer steps; above it hardly. At the critical size a run takes
twice the least number of samples and of steps (arXiv 1812.06162, section 2.3), which is why more devices help only as
long as the batch can be spread over them: the subject of arXiv 2106.02679.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from .search import Plan, plan
from .space import Question


def _by_loss(parameters: float, tokens: float) -> float:
    """arXiv 2001.08361, equation 5.6, with the method of arXiv 1812.06162: 2e8 / loss ** (1 / 0.21) tokens.

    The loss is that of arXiv 2203.15556, equation 10, for the parameters and tokens.
    """
    loss = 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28
    return 2e8 / loss ** (1 / 0.21)


# Name -> the critical batch size in tokens, of parameters and tokens.
CRITICAL_BATCH_LAWS: Mapping[str, Callable[[float, float], float]] = MappingProxyType({"1812.06162": _by_loss})


@dataclass(frozen=True)
class TimeToTrain:
    """The soonest end of a training on a number of devices."""

    num_devices: int
    global_batch_size: int
    steps: float
    days: float
    device_hours: float
    plan: Plan


def time_to_train(question: Question, parameters: float, tokens: float, law: str) -> Iterator[TimeToTrain]:
    """For 1, 2, 4, ... devices up to those of the question, where anything fits.

    The batch is the critical one, rounded down to a power of two of sequences, so twice the tokens are needed. Raises
    ValueError for an unknown law.
    """
    if law not in CRITICAL_BATCH_LAWS:
        raise ValueError(f"--critical-batch-law {law} is unknown; there are {', '.join(CRITICAL_BATCH_LAWS)}")
    critical = CRITICAL_BATCH_LAWS[law](parameters, tokens)
    sequences = max(1, int(critical // question.sequence_length))
    batch = 1 << (sequences.bit_length() - 1)
    steps = 2 * tokens / (batch * question.sequence_length)
    devices = 1
    while devices <= question.num_devices:
        found = plan(replace(question, num_devices=devices, global_batch_size=batch), best=1)
        if found:
            seconds = steps * found[0].prediction.seconds
            yield TimeToTrain(devices, batch, steps, seconds / 86400, devices * seconds / 3600, found[0])
        devices *= 2
