"""The tokens of a context-parallel rank in a run of tokens: of 2c equal parts, rank r of c has the r-th and the
(2c−1−r)-th, so that causal attention gives all ranks equal work. Megatron's `get_batch_on_this_cp_rank` divides so.

Tested in model/test_head_exchange.py by test_a_rank_receives_its_heads_and_queries_and_returns_them.
"""

type Run = tuple[int, int]  # start and end of consecutive tokens


def parts_of_rank(run: Run, rank: int, num_ranks: int) -> tuple[Run, Run]:
    """The two parts of a rank, each with its start and end, in order. The run is a multiple of 2c tokens long."""
    start, end = run
    part = (end - start) // (2 * num_ranks)
    first = start + rank * part
    second = end - (rank + 1) * part
    return (first, first + part), (second, second + part)
