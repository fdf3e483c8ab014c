"""Whatever rank fails, and however, all ranks end, with one sentence on rank 0 (see unit_tests/process/test_net.py)."""

import pytest

PROGRAM = """
import os, sys, time
from datetime import timedelta
from megatron.seq1f1b.process.net import Net
net = Net()
sys.excepthook = net.caught
net.connect()
rank = int(os.environ["RANK"])
if rank == 1:
    os.dup2(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), 2)
"""
PROGRAMS = {
    # Every rank makes the same mistake, one fails alone while another waits, one is interrupted.
    "all": ("raise ValueError('no data')", "error: no data."),
    "the last alone": (
        "if rank == 1: raise ValueError('no data')\ntime.sleep(60)",
        "error: no data (rank 1 on ",
    ),
    "the first alone": (
        "if rank == 0: raise KeyError('x')\ntime.sleep(60)",
        "error: KeyError: 'x'; the traceback is in",
    ),
    "interrupted": ("if rank == 1: raise KeyboardInterrupt\ntime.sleep(60)", "error: interrupted (rank 1 on "),
    "without memory for words": (
        "from megatron.seq1f1b.process import net as file\n"
        "if rank == 1:\n"
        "    def _failure_of(*_): raise MemoryError\n"
        "    file._failure_of = _failure_of\n"
        "    report, tries = net._peers.report, []\n"
        "    def report_again(failure):\n"
        "        tries.append(failure)\n"
        "        if len(tries) < 3: raise MemoryError\n"
        "        return report(failure)\n"
        "    net._peers.report = report_again\n"
        "    raise ValueError('no data')\ntime.sleep(60)",
        "error: the memory of this host is full (rank 1 on ",
    ),
    "with a thread that never ends": (
        "import threading\n"
        "from megatron.seq1f1b.process import net as file\n"
        "file._PATIENCE = 5\n"
        "threading.Thread(target=time.sleep, args=[600]).start()\n"
        "if rank == 1: raise ValueError('no data')\ntime.sleep(60)",
        "error: no data (rank 1 on ",
    ),
    "other flags": (
        "net.require_equal({'--num-layers': str(rank + 1)}, timedelta(minutes=1))\ntime.sleep(60)",
        "error: the ranks disagree: --num-layers is 2 on rank 1, but 1 on rank 0; start all ranks with",
    ),
}


@pytest.mark.parametrize("body, sentence", PROGRAMS.values(), ids=PROGRAMS)
def test_all_ranks_end_with_one_sentence_on_rank_0(launch, tmp_path, body, sentence):
    (tmp_path / "program.py").write_text(PROGRAM + body)
    job = launch(2, [tmp_path / "rank 1"], tmp_path / "program.py", watched=False)
    assert job.log.startswith(sentence) and job.log.count("\n") == 1, job.log
    assert (tmp_path / "rank 1").read_text() == ""
    assert 0 not in job.codes, job
