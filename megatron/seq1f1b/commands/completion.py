"""Print a script that makes bash complete the commands of `seq1f1b` and their flags.

eval "$(seq1f1b completion)"      # in ~/.bashrc; in zsh after `autoload bashcompinit; bashcompinit`
"""

import re
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO

from . import COMMANDS
from .parsing import Parser

_SCRIPT = """\
_seq1f1b() {{
    local words=""
    case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
        1:*) words="{commands} --help --version" ;;
{flags}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _seq1f1b seq1f1b
"""


def main(argv: Sequence[str] | None = None) -> int:
    Parser(__doc__).parse_args(argv)
    names = [name for name in COMMANDS if name != "completion"]
    flags = "\n".join(f'        *:{name}) words="{" ".join(_flags(name))}" ;;' for name in names)
    print(_SCRIPT.format(commands=" ".join(COMMANDS), flags=flags), end="")
    return 0


def _flags(name: str) -> list[str]:
    """The flags that the help of a command shows."""
    with redirect_stdout(StringIO()) as text, suppress(SystemExit):
        import_module(f".{COMMANDS[name][0]}", __package__).main(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text.getvalue())))
