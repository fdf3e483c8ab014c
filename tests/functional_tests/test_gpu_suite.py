"""The code of scripts/gpu_test.sh runs on a CPU, at sizes that measure nothing: what it measures needs a GPU."""

import inspect
import json
import lzma
import os
import subprocess
import sys
import time
import tomllib
import zipfile
from argparse import Namespace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import PContext

import measured
from gpu_tests import nccl, pipelines, run, suite
from support.fat_binaries import LIBRARY
from support.launch import ENVIRONMENT, ROOT


def test_without_a_gpu_every_section_is_named_and_skipped():
    command = ["bash", ROOT / "scripts" / "gpu_test.sh"]
    environment = os.environ | ENVIRONMENT | {"PYTHON": sys.executable}
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert "No GPU is visible" in printed and printed.count("skipped ") == len(run.sections_for(1)) == 11


@pytest.mark.parametrize(
    "sections",
    [(1, 2), (5,), (11,), pytest.param((3, 4, 7, 9, 10), marks=[pytest.mark.exhaustive, pytest.mark.timeout(2400)])],
    ids=str,
)
def test_the_code_of_the_sections_runs(launch, monkeypatch, tmp_path, sections):
    """Its processes are forks of one that has imported Megatron."""

    def process(self, name, command, ranks=1, queues=1, limit=None):
        place = next(index for index, word in enumerate(command) if word.endswith(".py"))
        ranks = int(command[place - 1].partition("--nproc-per-node=")[2] or 1)
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
        job = launch(ranks, command[place + 1 :], Path(command[place]), timeout=400, env=environment)
        return suite.Ended(f"exit code {job.code}: {suite.reason_in(job.log)}" if job.code else None, job.log)

    output = tmp_path / "out.json"
    monkeypatch.setattr(suite.Suite, "process", process)
    monkeypatch.setattr(suite.Suite, "beside", lambda self, *calls: [call() for call in calls])
    flags = ["--device", "cpu", "--tiny", "--output", str(output), "--seconds", "2400", "--only", *map(str, sections)]
    monkeypatch.setattr(sys, "argv", ["run.py", *flags])
    with pytest.raises(SystemExit) as end:
        run.main()
    result = json.loads(output.read_text())
    found = result["sections"]
    assert not end.value.code and len(found) == len(sections)
    assert all(check["passed"] is not False for section in found for check in section["checks"])
    assert all(section["checks"] and section["figures"] for section in found)
    # The page has every figure of the suite that it has a table for.
    page = measured.page_of(result)
    tables = {figure["table"] for section in found for figure in section["figures"]}
    for table in measured.TABLES:
        assert (f"## {table.title}\n" in page) == (table.name in tables)
    if len(sections) > 3:
        assert tables >= {"pipelines", "training", "nccl", "stage", "prediction", "host", "offload", "loss", "longest"}


@pytest.mark.parametrize(
    "ours, passed", [([2.0, 1.5], True), ([2.0, 1.0], False), ([2.0], False), ([], False)], ids=str
)
def test_a_run_is_judged_by_the_numbers_of_all_its_steps(ours, passed):
    assert suite.agree("norms of gradients", ours, [2.0, 1.51], 1e-2)["passed"] is passed


def test_the_peak_of_a_variant_is_its_own(monkeypatch):
    """Not that of an earlier one, which CUDA's counters still have."""
    from gpu_tests import ranks  # imports Megatron

    memory = SimpleNamespace(now=100, peak=5000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(memory, "peak", memory.now))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: memory.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory.peak)
    model = torch.nn.Linear(1, 1)

    def step(**arguments: object) -> list:
        memory.peak = max(memory.peak, memory.now + 30)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return []

    args = Namespace(device="cpu", tiny=True, unequal=False, segments=2, backend="gloo")
    assert ranks.train(step, [model], 8, args).peak == 30


def suite_of(folder: Path, until: float, cores: int = 2) -> suite.Suite:
    return suite.Suite("cpu", True, folder, suite.Cores(cores), until)


def test_running_out_of_time_is_no_failure(tmp_path, monkeypatch):
    """What was found until then counts."""
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "output = pathlib.Path(sys.argv[sys.argv.index('--output') + 1])\n"
        """output.write_text('{"checks": [{"name": "early", "passed": true, "found": ""}], "figures": []}')\n"""
        "os.kill(os.getppid(), signal.SIGALRM)\n"  # as when the time is over
        "time.sleep(1000)\n"
    )
    monkeypatch.setattr(suite, "HERE", tmp_path)
    found = suite_of(tmp_path, time.monotonic() + 1000).program("sleeper")
    assert [suite.verdict(check) for check in found.checks] == ["ok", "not run"]
    assert suite_of(tmp_path, 0.0).process("late", ["false"]) == (suite.OUT_OF_TIME, "")


def test_a_failed_program_is_told_by_its_first_error(tmp_path, monkeypatch):
    """Not by that of torchrun, which comes last."""
    (tmp_path / "failing.py").write_text(
        "import sys, torch.distributed\nraise RuntimeError('called a synchronizing CUDA operation')\n"
    )
    monkeypatch.setattr(suite, "HERE", tmp_path)
    found = suite_of(tmp_path, time.monotonic() + 1000).program("failing", ranks=1)
    (check,) = found.checks
    assert check["passed"] is False and "RuntimeError: called a synchronizing CUDA operation" in check["found"]
    assert pipelines.waits_of_the_host(found)["passed"] is False
    assert pipelines.waits_of_the_host(suite.Found())["passed"] is None


def test_a_section_that_raises_has_failed_and_others_follow(tmp_path):
    def broken(of_suite: suite.Suite) -> suite.Found:
        raise KeyError("bfloat16_peak")

    result = run.result_of(run.Section("broken", 1, broken), suite_of(tmp_path, time.monotonic() + 1000), gpus=1)
    (check,) = result["checks"]
    assert check == {"name": "broken", "passed": False, "found": "KeyError: 'bfloat16_peak'"}


def test_torchrun_has_time_to_kill_its_ranks():
    """Else ranks that ignore its signal would keep the GPU after their section."""
    waits = inspect.signature(PContext.close).parameters["timeout"].default
    assert suite.TO_END > waits > 0


def test_a_process_waits_for_a_core_for_each_of_its_ranks():
    cores, order, ready, done = suite.Cores(2), [], Event(), Event()

    def take(name: str, ranks: int) -> None:
        with cores.taken(ranks):
            order.append(name)
            ready.set()
            done.wait()

    threads = [Thread(target=take, args=("one", 1))]
    threads[0].start()
    ready.wait()
    for name, ranks in (("four", 4), ("last", 1)):  # the last one would have a core, but came later
        threads.append(Thread(target=take, args=(name, ranks)))
        threads[-1].start()
        while len(cores._waiting) < len(threads) - 1:
            time.sleep(0.001)
    assert order == ["one"]
    done.set()
    for thread in threads:
        thread.join()
    assert order == ["one", "four", "last"]


@pytest.mark.parametrize(
    "now, number, limit",
    [
        pytest.param(0, 0, 40, id="its own and what nobody plans"),
        pytest.param(40, 1, 30, id="after one that took all of that"),
        pytest.param(10, 1, 60, id="after a short one"),
        pytest.param(60, 0, 20, id="late, the first has its own"),
        pytest.param(80, 1, 20, id="late, the second has what is left"),
        pytest.param(100, 2, 0, id="late, the last has nothing"),
    ],
)
def test_a_slow_start_takes_from_the_last_sections(monkeypatch, now, number, limit):
    """Of three sections that plan 20, 30 and 30 seconds of 100."""
    sections = [run.Section(str(seconds), seconds, suite.Suite.program) for seconds in (20, 30, 30)]
    monkeypatch.setattr(run.time, "monotonic", lambda: now)
    budget = run.Budget(end=100)
    assert budget.until([sections[number]], sections[number + 1 :]) - now == limit


def test_nothing_but_the_end_limits_the_start_and_a_cpu():
    start, *others = run.sections_for(1)
    assert run.Budget(end=100).until([start], others) == 100
    assert run.Budget(end=100, is_auto=False).until(others[:1], others[1:]) == 100


def test_sections_that_cannot_run_plan_no_time():
    """All others share what the suite has by default."""
    runnable = [section for section in run.sections_for(1) if section.lacks(gpus=1) is None]
    assert sum(section.seconds for section in runnable) <= run.SECONDS
    assert any("eight GPUs" in section.title for section in run.sections_for(1) if section not in runnable)


def on_one_gpu(monkeypatch, tmp_path, version, works=(), has_mps=False):
    """The section of NCCL on one GPU, with an NCCL of that `version` that `works` with some numbers of the ladder; and
    the settings that were tried."""
    tried = []

    def program(self, name, *flags, ranks=0, queues=1, output="", limit=None):
        found = suite.Found()
        if name == "nccl_probe":
            tried.append(nccl.LADDER[int(output)].name)
            assert limit == nccl.LIMIT and self.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
            found.check("NCCL", int(output) in works or None, "" if int(output) in works else suite.OUT_OF_TIME)
        return found

    monkeypatch.setattr(suite.Suite, "program", program)
    monkeypatch.setattr(nccl, "version", lambda: version)
    monkeypatch.setattr(nccl, "MPS", "true" if has_mps else "no-such-program")  # which ends well, whatever it is told
    of_one = suite.Suite("cuda", False, tmp_path, suite.Cores(16), time.monotonic() + 1000)
    return pipelines.over_nccl(of_one, gpus=1), tried


def test_ranks_share_a_gpu_by_the_first_settings_that_work(monkeypatch, tmp_path, capsys):
    found, tried = on_one_gpu(monkeypatch, tmp_path, (2, 30, 7), works=(2, 3))
    assert tried == [settings.name for settings in nccl.LADDER[:3]]
    assert found.checks[0]["passed"] and "sockets" in found.checks[0]["found"]
    assert "NCCL lets ranks share the GPU: sockets" in capsys.readouterr().out
    assert [figure["works"] for figure in found.figures if figure["table"] == "nccl"] == [False, False, True]


@pytest.mark.parametrize("has_mps", [False, True])
def test_settings_of_nccl_that_all_fail_are_no_failure_of_ours(monkeypatch, tmp_path, has_mps):
    found, tried = on_one_gpu(monkeypatch, tmp_path, (2, 31, 0), has_mps=has_mps)
    assert len(tried) == (5 if has_mps else 3)
    (check,) = found.checks
    assert suite.verdict(check) == "not run" and all(name in check["found"] for name in tried)


@pytest.mark.parametrize("version, words", [((2, 28, 9), "2.28.9"), (None, "none")], ids=str)
def test_an_older_nccl_is_told_what_is_needed(monkeypatch, tmp_path, version, words):
    found, tried = on_one_gpu(monkeypatch, tmp_path, version)
    (check,) = found.checks
    assert not tried and suite.verdict(check) == "not run"
    assert f"needs NCCL 2.30 or later (here: {words})" in check["found"]


def test_what_is_packed_is_used_in_place_of_what_python_lacks(tmp_path):
    """A Python with torch alone finds Megatron in the packed wheel, and NCCL in the packed library."""
    packed = tmp_path / "packed"
    bare = tmp_path / "python"
    image = tmp_path / "image"
    (image / "torch").mkdir(parents=True)
    (image / "torch" / "__init__.py").touch()
    packed.mkdir()
    for package in ("megatron/core", "msgspec", "greenlet"):
        with zipfile.ZipFile(packed / f"{package.replace('/', '_')}-0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{package}/__init__.py", "")
    (packed / "libnccl.so.2.xz").write_bytes(lzma.compress(b"a library"))
    # Instead of the suite it tells what it was given.
    bare.write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in\n'
        '    *gpu_tests.run*) LIBRARY=$LD_PRELOAD; unset LD_PRELOAD; cat "$LIBRARY"; echo " at $PYTHONPATH" ;;\n'
        f'    *) exec {sys.executable} -S "$@" ;;\n'
        "esac\n"
    )
    bare.chmod(0o755)
    command = ["bash", ROOT / "scripts" / "gpu_test.sh"]

    def start(**settings: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | ENVIRONMENT | {"PYTHON": str(bare), "PYTHONPATH": str(image)} | settings
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    ended = start(PACKED=str(packed))
    assert ended.returncode == 0, ended.stderr
    library, _, path = ended.stdout.strip().partition(" at ")
    assert library == "a library" and path.startswith(f"{ROOT}:{ROOT}/tests:")
    assert not Path(path.rpartition(":")[2]).exists()  # what was unpacked is gone
    without = start()
    assert without.returncode == 1 and "has no megatron-core" in without.stderr
    empty = start(PACKED=str(tmp_path / "empty"))
    assert empty.returncode == 1 and "has no wheels" in empty.stderr


def test_the_folder_that_is_carried_to_a_gpu(tmp_path):
    """By a stand-in for pip, which copies the wheels that it would download."""
    nccl_wheel = tmp_path / "nvidia_nccl_cu13-2.30.7-py3-none-any.whl"
    with zipfile.ZipFile(nccl_wheel, "w") as wheel:
        wheel.writestr("nvidia/nccl/lib/libnccl.so.2", LIBRARY)
    # Images with torch have numpy; pictures are not drawn there, and no shell completes commands.
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = {"megatron_core", *dependencies} - {"numpy", "matplotlib", "shtab"}
    for package in packages:
        (tmp_path / f"{package}-0.0-py3-none-any.whl").write_bytes(b"a wheel")
    python = tmp_path / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        f'if [ "$2" != pip ]; then exec {sys.executable} "$@"; fi\n'
        "package=${*: -1} folder=${*: -2:1}\n"
        "name=${package%%==*}\n"
        f'cp {tmp_path}/"${{name//-/_}}"-*.whl "$folder"\n'
    )
    python.chmod(0o755)
    folder = tmp_path / "packed"
    command = ["bash", ROOT / "scripts" / "pack_gpu_test.sh", folder]

    def pack(**settings: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | ENVIRONMENT | {"PYTHON": str(python)} | settings
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    ended = pack()
    assert ended.returncode == 0, ended.stderr
    names = {path.name for path in folder.iterdir()} - {".made-by-seq1f1b"}
    assert names == {"libnccl.so.2.xz", *(f"{package}-0.0-py3-none-any.whl" for package in packages)}
    library = lzma.decompress((folder / "libnccl.so.2.xz").read_bytes())
    assert b"h" * 64 in library and b"a" * 64 not in library
    wrong = pack(ARCHITECTURE="100")
    assert wrong.returncode == 1 and "no code for sm_100" in wrong.stderr
