"""Mistakes of a user as sentences, with each parameter under the name that this user set it by.

The pure rooms, which have no flags, raise a ParameterError in the keywords of their own functions:

    raise ParameterError("{num_segments} must be at least {0}", 1, num_segments=0)

Its text is for callers of that function: "num_segments=0 must be at least 1". On a command line,
`arguments/naming` writes the same sentence with flags: "--sequence-splits 0 must be at least 1".
"""

from collections import defaultdict
from collections.abc import Callable
from string import Formatter

# From a parameter, and its value or None for the name alone, to how a sentence writes them.
Naming = Callable[[str, object], str]


class ParameterError(ValueError):
    """A mistake in `sentence`, a format string.

    Its keywords are parameters: `{length}` stands for the parameter with its value in `values`, or by its name alone if
    it has none there, `{length.name}` always for the name, `{length:8}` for the parameter with the value 8. Everything
    else that a sentence quotes is given by position, in `words`.
    """

    def __init__(self, sentence: str, *words: object, **values: object) -> None:
        self.sentence = sentence
        self.words = words
        self.values = values
        super().__init__(self.named(by_keyword))

    def named(self, naming: Naming) -> str:
        """The sentence, with every parameter as `naming` writes it."""
        return Formatter().vformat(self.sentence, self.words, _Parameters(naming, self.values))


def by_keyword(parameter: str, value: object) -> str:
    """As in a call: `num_segments=8`."""
    return parameter if value is None else f"{parameter}={value}"


class _Parameters(defaultdict[str, "_Parameter"]):
    """A parameter for every name that a sentence uses."""

    def __init__(self, naming: Naming, values: dict[str, object]) -> None:
        super().__init__()
        self._naming = naming
        self._values = values

    def __missing__(self, name: str) -> "_Parameter":
        return _Parameter(self._naming, name, self._values.get(name))


class _Parameter:
    def __init__(self, naming: Naming, parameter: str, value: object) -> None:
        self._naming = naming
        self._parameter = parameter
        self._value = value

    @property
    def name(self) -> str:
        return self._naming(self._parameter, None)

    def __format__(self, value: str) -> str:
        return self._naming(self._parameter, value or self._value)
