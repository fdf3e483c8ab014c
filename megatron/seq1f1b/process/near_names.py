"""The known names that an unknown one may stand for."""

from collections.abc import Iterable
from difflib import get_close_matches

_MOST = 6  # names that are suggested
_LEAST = 3  # letters of a part of a name


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """All names that begin with it, else all that have it as a part, else the one that looks most like it; [] if there
    is none. Case and the dashes before a flag do not count."""
    names = {known_name.lstrip("-").lower(): known_name for known_name in known}
    given = name.lstrip("-").lower()
    starts = [known_name for known_name in names if known_name.startswith(given)]
    parts = [known_name for known_name in names if given in known_name] if len(given) >= _LEAST else []
    for found in (starts, parts):
        if given and 0 < len(found) <= _MOST:
            return [names[known_name] for known_name in found]
    return [names[known_name] for known_name in get_close_matches(given, names, n=1)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question after these names; empty if there are none."""
    names = near_names(name, known)
    if not names:
        return ""
    *first, last = names
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"
