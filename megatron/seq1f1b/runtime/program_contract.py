"""What a program relies on when its steps are run.

Tested in functional_tests/test_programs.py by test_a_program_trains_as_with_whole_sequences.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass


def _as_it_is(stage: int, length: int) -> AbstractContextManager:
    return nullcontext()


@dataclass(frozen=True)
class ProgramContract:
    """What a program expects of the function that runs its steps; by default, no more than Megatron's contract.

    - `around_program(stage, length)`: entered while the program runs on a stage for sequences of `length` tokens.
      Programs read the length, and whether their rank has data, from globals.
    - `divides_documents`: the program gives context-parallel ranks a share of each document of a pack, else of whole
      sequences.
    - `reports_on_last_rank`: the last rank gets the reports of the loss, even if another rank computes it.
    """

    around_program: Callable[[int, int], AbstractContextManager] = _as_it_is
    divides_documents: bool = False
    reports_on_last_rank: bool = False
