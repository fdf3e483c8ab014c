"""pretrain_gpt.py of this repository, which starts the process for checkpoints as on a GPU: in a new Python.

That imports pretrain_gpt.py, too.
"""

import runpy
import sys
from pathlib import Path

from megatron.seq1f1b.cpu import stand_ins

stand_ins.queue_of_forks = lambda get_write_results_queue: get_write_results_queue
script = Path(__file__).parents[3] / "pretrain_gpt.py"
sys.argv[0] = str(script)
runpy.run_path(str(script), run_name="__main__")
