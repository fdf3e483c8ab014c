"""Plans for a histogram of lengths (`seq1f1b plan --lengths`): reading it, and the table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..planning.costs.flops import model_flops
from ..planning.planner.lengths import UnitPlan, UnitSearch
from .plan_text import Gain, parallel_sizes, ranking, schedule_name

_LONGEST = 10**8  # tokens; a plan for more would take hours
_INDEX = b"MMIDIDX\x00\x00"  # how an index of Megatron starts
_HEADER = len(_INDEX) + 8 + 1 + 16  # and its version, type, and numbers of sequences and documents


def read_histogram(path: Path) -> Mapping[int, int]:
    """How many sequences there are of each length in tokens.

    From text with a line `tokens,sequences`, or `tokens` alone, for each, where words make a line a comment; or from
    the .idx file of a corpus. Raises ValueError for anything else.
    """
    content = path.read_bytes()
    if content.startswith(_INDEX):
        number = int.from_bytes(content[_HEADER - 16 : _HEADER - 8], "little")
        sizes = content[_HEADER : _HEADER + 4 * number]
        lengths = Counter(memoryview(sizes).cast("i")) if len(sizes) == 4 * number else Counter()
        del lengths[0]
        if not lengths or min(lengths) < 0:
            raise ValueError(f"--lengths {path} is cut off, damaged or without tokens; make the corpus again")
        return lengths
    found: Counter[int] = Counter()
    for number, line in enumerate(content.decode("utf-8-sig", errors="replace").splitlines(), start=1):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("#") or (number == 1 and words[0].isalpha()):
            continue
        if len(words) > 2 or not all(word.isascii() and word.isdigit() and 0 < int(word) < 10**12 for word in words):
            raise ValueError(
                f"--lengths {path}, line {number}: {line.strip()!r} is not 'tokens,sequences', two whole numbers from "
                "1 on; correct the line"
            )
        if int(words[0]) > _LONGEST:
            raise ValueError(f"--lengths {path}, line {number}: no sequence has {words[0]} tokens; correct the line")
        found[int(words[0])] += int(words[1]) if len(words) == 2 else 1
    if not found:
        raise ValueError(f"--lengths {path} has no lengths; give a line 'tokens,sequences' for each")
    return found


def title(search: UnitSearch) -> str:
    counts, asked = search.histogram, search.question
    drawn = sorted(length for step in search.steps for length in step)
    return (
        f"{sum(counts.values()):,} sequences of {min(counts):,} to {max(counts):,} tokens, "
        f"{search.tokens / asked.global_batch_size:,.0f} on average, half of them up to {drawn[len(drawn) // 2]:,}; "
        f"steps of {asked.global_batch_size} on {asked.num_devices} x {asked.machine.device.name}, "
        f"{asked.memory_limit:.1f} GiB a device. Means over {len(search.steps)} steps; memory is that of a step with "
        "the longest sequence."
    )


def table(plans: Sequence[UnitPlan], megatron: UnitPlan | None, given: UnitPlan | None, search: UnitSearch) -> str:
    return "\n" + "\n".join(ranking(plans, megatron, given, lambda plan: _row(plan, search))) + "\n"


def _row(plan: UnitPlan, search: UnitSearch) -> Mapping[str, str]:
    setup, asked, units = plan.prediction.setup, search.question, plan.candidate.unit_tokens
    steps, lengths = len(search.steps), Counter(length for step in search.steps for length in step)
    flops = sum(model_flops(asked.model, length, count) for length, count in lengths.items()) / steps
    seconds = search.tokens / plan.tokens_per_second
    return parallel_sizes(setup) | {
        "unit": f"{setup.sequence_length} packs" if units is None else str(units),
        "schedule": schedule_name(setup),
        "recompute": setup.recompute,
        "step s": f"{seconds:.3f}",
        "tokens/s a GPU": f"{plan.tokens_per_second / asked.num_devices:.0f}",
        "TFLOPS": f"{flops / seconds / asked.num_devices / 1e12:.0f}",
        "bubble": f"{100 * plan.bubble:.1f} %",
        "padding": f"{100 * plan.padding:.1f} %",
        "GiB": f"{plan.memory_gib:.1f}",
    }


def megatron_alone(best: UnitPlan, megatron: UnitPlan | None, error: float) -> str:
    """How units compare with Megatron's own schedules on packs as long as the longest sequence."""
    if megatron is None:
        return "Megatron's own schedules do not hold packs as long as the longest sequence."
    found = Gain(best.seconds, best.tokens / megatron.tokens_per_second, error)
    return f"Units gain {found} over Megatron's own schedules on packs as long as the longest sequence."
