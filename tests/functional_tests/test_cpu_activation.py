"""Nothing is redirected unless asked for, and everything in the table is once it is."""

import sys

import pytest
import torch

from megatron.seq1f1b import cpu
from support.launchers import run

# In a process of its own: redirects last as long as the process.
BEFORE_AND_AFTER = """
from megatron.seq1f1b import cpu
from megatron.seq1f1b.cpu.redirects import REDIRECTS, is_active
from megatron.seq1f1b.patches import owner_of

def bound():
    return [getattr(*owner_of(patch.target)) for patch in REDIRECTS]

def ours(thing):
    thing = getattr(thing, "func", thing)  # a functools.partial
    code = getattr(thing, "__code__", None)
    return "seq1f1b" in (code.co_filename if code else getattr(thing, "__module__", None) or "")

import megatron.core, megatron.training
before = bound()
assert not is_active()
assert not [thing for thing in before if ours(thing)]
cpu.activate()
cpu.activate()
after = bound()
assert is_active()
same = [patch.target for patch, old, new in zip(REDIRECTS, before, after) if old is new]
assert not same, same

# Megatron was imported first, and yet:
import torch
assert torch.zeros(2, device="cuda").device.type == "cpu"
with torch.device("meta"):
    assert torch.zeros(2).device.type == "meta"
assert torch.ones(1).cuda().type() == "torch.cuda.FloatTensor"
assert torch.ones(1).type(torch.int32).dtype == torch.int32
print("as promised")
"""


def test_only_when_activated():
    result = run([sys.executable, "-W", "ignore", "-c", BEFORE_AND_AFTER], timeout=120)
    assert "as promised" in result.stdout, result.stderr[-3000:]


def test_schedules_do_without_torch():
    """Reading or drawing a schedule should not take the seconds that importing torch does."""
    code = "import sys, megatron.seq1f1b.schedule; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "flags, is_wanted",
    [
        (["pretrain_gpt.py", "--device", "cpu"], True),
        (["--device=cpu"], True),
        ([], False),
        (["--device", "auto"], False),
        (["--device", "cuda"], False),
    ],
)
def test_a_visible_gpu_is_used_unless_the_flag_is_cpu(monkeypatch, caplog, flags, is_wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.wanted(flags) == is_wanted
    assert not caplog.records


@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_a_gpu_one_line_on_rank_0(monkeypatch, caplog, rank):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("RANK", rank)
    assert cpu.wanted([])
    assert caplog.text.count("No GPU is visible") == len(caplog.records) == (1 if rank == "0" else 0)
    with pytest.raises(SystemExit, match="no GPU is visible"):
        cpu.wanted(["--device", "cuda"])
