"""pretrain_gpt.py of this repository, with the double of Transformer Engine's extension."""

import runpy
import sys
from pathlib import Path

from support import te_double

te_double.load()
script = Path(__file__).parents[3] / "pretrain_gpt.py"
sys.argv[0] = str(script)
runpy.run_path(str(script), run_name="__main__")
