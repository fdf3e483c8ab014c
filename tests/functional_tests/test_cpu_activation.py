"""Nothing is redirected unless asked for, and everything in the table is once it is."""

import sys

import pytest
import torch

from megatron.seq1f1b.platform import cpu
from support.files import write_files
from support.launch import ROOT, python_path
from support.launchers import run

# A process that has imported Megatron, and a fork of it for each program: what they bind lasts as long as a process.
FORKS = """
import os, sys
import megatron.core, megatron.training
for program in sys.argv[1:]:
    if os.fork() == 0:
        exec(program)
        sys.exit()
    os.wait()
"""

# A GPU seems to be there, so nothing is redirected.
WITH_A_GPU = """
import torch
torch.cuda.is_available = lambda: True
sys.argv = ["script"]
import megatron.seq1f1b
from megatron.seq1f1b.platform import cpu
from megatron.seq1f1b.platform import without_te
from megatron.seq1f1b.process.patches import owner_of
megatron.seq1f1b.install(sequence_splits=2)
assert not cpu.is_active()
repairs = without_te.LOCAL_LAYERS + without_te.TORCH_ADAM
assert all(hasattr(getattr(*owner_of(patch.target)), "__wrapped__") for patch in repairs)
print("repaired")
"""
BEFORE_AND_AFTER = """
from megatron.seq1f1b.platform import cpu
from megatron.seq1f1b.platform.redirects import REDIRECTS
from megatron.seq1f1b.process.patches import owner_of

def bound():
    return [getattr(*owner_of(patch.target)) for patch in REDIRECTS]

def ours(thing):
    thing = getattr(thing, "func", thing)  # a functools.partial
    code = getattr(thing, "__code__", None)
    return "seq1f1b" in (code.co_filename if code else getattr(thing, "__module__", None) or "")

before = bound()
assert not cpu.is_active()
assert not [thing for thing in before if ours(thing)]
cpu.activate()
cpu.activate()
after = bound()
assert cpu.is_active()
same = [patch.target for patch, old, new in zip(REDIRECTS, before, after) if old is new]
assert not same, same

# Megatron was imported first, and yet:
import torch
assert torch.zeros(2, device="cuda").device.type == "cpu"
with torch.device("meta"):
    assert torch.zeros(2).device.type == "meta"
assert torch.jit.script(bound) is bound  # else it fails at a redirected function in the source
assert torch.ones(1).cuda().type() == "torch.cuda.FloatTensor"
assert torch.ones(1).type(torch.int32).dtype == torch.int32
print("as promised")
"""
# Megatron would build its norm of the apex that is there, and take the optimizer of either package.
IN_A_CONTAINER = """
from megatron.seq1f1b.platform import cpu
cpu.activate()
from megatron.core.models.gpt.gpt_layer_specs import LNImpl
from megatron.core.optimizer import distrib_optimizer
print(LNImpl.__name__, distrib_optimizer.HAVE_APEX_OR_TE)
"""


def test_redirects_are_for_cpus_and_repairs_for_gpus_too():
    """The former only once they are activated; the latter are of what needs Transformer Engine or apex."""
    result = run([sys.executable, "-W", "ignore", "-c", FORKS, WITH_A_GPU, BEFORE_AND_AFTER], timeout=120)
    assert result.stdout.splitlines()[-2:] == ["repaired", "as promised"], result.stderr[-3000:]


def test_kernels_of_a_container_for_gpus_are_not_taken(tmp_path):
    optimizers = "class FusedAdam: ...\nclass FusedSGD: ...\n"
    packages = ("apex/__init__.py", "transformer_engine/__init__.py", "transformer_engine/pytorch/__init__.py")
    files = dict.fromkeys((*packages, "transformer_engine_torch.py"), "")
    files |= {"apex/optimizers.py": optimizers, "transformer_engine/pytorch/optimizers.py": optimizers}
    paths = python_path(ROOT, write_files(tmp_path, files))
    result = run([sys.executable, "-W", "ignore", "-c", IN_A_CONTAINER], timeout=120, PYTHONPATH=paths)
    assert result.stdout.splitlines()[-1:] == ["WrappedTorchNorm False"], result.stderr[-3000:]


def test_schedules_do_without_torch():
    """Reading or drawing a schedule should not take the seconds that importing torch does."""
    code = "import sys, megatron.seq1f1b.schedule; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "flags", ["pretrain_gpt.py --device cpu", "--device=cpu", "", "--device auto", "--device cuda"]
)
def test_a_visible_gpu_is_used_unless_the_flag_is_cpu(monkeypatch, caplog, flags):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.wanted(flags.split()) == ("cpu" in flags)
    assert not caplog.records


@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_a_gpu_one_line_on_rank_0(monkeypatch, caplog, rank):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("RANK", rank)
    assert cpu.wanted([])
    assert caplog.text.count("No GPU is visible") == len(caplog.records) == (1 if rank == "0" else 0)
    with pytest.raises(ValueError, match="no GPU is visible"):
        cpu.wanted(["--device", "cuda"])
