"""How many sequences there are of each length: the file that `seq1f1b plan --lengths` reads."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

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
