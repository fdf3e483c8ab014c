"""The quick start of the README, shortened."""

import os
import re
import subprocess

from support.launch import ROOT
from support.patience import patient


def test_quick_start_trains_twice_and_compares(tmp_path):
    settings = {"OUTPUT": str(tmp_path), "TRAIN_ITERS": "3", "SEQ_LENGTH": "512", "VOCAB_SIZE": "1000"}
    run = subprocess.run(
        ["bash", ROOT / "scripts" / "quickstart.sh"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    logs = [path.read_text(errors="replace") for path in tmp_path.glob("*/log.txt")]
    assert run.returncode == 0, "\n".join([run.stdout[-3000:], run.stderr[-1000:], *(log[-3000:] for log in logs)])
    # What a CPU lacks of packages for GPUs is nothing that its user can act on.
    imports = [log.partition("using world size: 2")[0] for log in logs]
    assert len(imports) == 2 and imports != logs and not re.search("Warning|CUDA_HOME", "".join(imports))
    assert run.stdout.count("iteration     3/3") == 2
    (difference,) = re.findall(r"Losses of the first 3 iterations differ by at most (\S+)\.", run.stdout)
    assert float(difference) < 1e-4
    assert (tmp_path / "timelines.png").stat().st_size > 10_000
