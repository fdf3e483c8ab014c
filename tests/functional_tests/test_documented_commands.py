"""Every command of the README, CONTRIBUTING and docs/ runs, or is named here with the test that runs it."""

import re
import shlex

import pytest

from support.launch import ROOT, python_path
from support.launchers import started

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = ROOT / "tests"

# Commands, without settings in front of them, and the file of the tests that run them.
ELSEWHERE = {
    r"torchrun --no-python .* seq1f1b profile .*": "functional_tests/test_benchmarks.py",
    r"seq1f1b (?!compare|enable).*": "unit_tests/test_docs_site.py",
    r"seq1f1b enable": "functional_tests/test_environment.py",
    r"python examples/seq1f1b_from_scratch\.py": "functional_tests/test_teaching_file.py",
    r"seq1f1b compare .*": "functional_tests/test_quickstart.py",
    r"bash scripts/quickstart\.sh": "functional_tests/test_quickstart.py",
    r"bash scripts/(pack_)?gpu_test\.sh.*": "functional_tests/test_gpu_suite.py",
    r"bash scripts/site\.sh": "functional_tests/test_playground.py",
    r"bash scripts/test\.sh.*": "unit_tests/test_contributing.py",  # and CI, which starts with it
    r"sbatch .* scripts/slurm/pretrain\.sbatch": "functional_tests/test_slurm.py",
    r"salloc .* bash scripts/check_cluster\.sh .*": "functional_tests/test_check_cluster.py",
    r"torchrun .* tools/benchmark_prediction\.py.*": "functional_tests/test_benchmarks.py",
    r"sudo .*python tools/benchmark_network\.py.*": "functional_tests/test_benchmarks.py",
    r"bash scripts/frameworks\.sh megatron-bridge": "frameworks/test_megatron_bridge.py",
    r"bash scripts/frameworks\.sh verl --collect-only": "frameworks/test_verl.py",
    r"\.venv-verl/bin/torchrun .* tools/benchmark_posttraining\.py": "frameworks/test_verl.py",
    r"python tools/benchmark_attention\.py.*": "functional_tests/test_benchmarks.py",
    r"python tools/benchmark_longest\.py.*": "functional_tests/test_benchmarks.py",
    r"python tools/benchmark_host\.py": "unit_tests/runtime/test_host_share.py",
    r"python tools/paper_tables\.py --reference mine": "unit_tests/tools/test_paper_reference.py",
}
BENCHMARK = re.compile(r"torchrun --nproc-per-node (\d+) tools/benchmark\.py (.*)")
# Of other projects, or with parts for the reader to fill in.
NOT_OURS = (
    r"pip install .*",
    r"mkdir .*",
    r"export .*",
    r"(echo|head) .*",
    r"printf .*",
    r"pre-commit install",
    r"torchrun \.\.\. .*",
    r".* \.\.\.",
)
# At these sizes a documented benchmark takes seconds.
SHRUNK = ("--seq-length", "64", "--hidden-size", "32", "--repeats", "1")


def commands() -> dict[str, tuple[str, dict[str, str]]]:
    """By the text of a command: its words and the settings in front of them."""
    found = {}
    for page in PAGES:
        for text in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in re.split(r"(?<!\\)\n", text.strip()):
                for part in re.split(r"&&|\|(?= tee)", line.replace("\\\n", " ")):
                    words = shlex.split(part, comments=True)
                    if not words or words[0] == "tee":
                        continue
                    count = next(i for i, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word))
                    settings = dict(word.split("=", 1) for word in words[:count])
                    found[" ".join(words)] = " ".join(words[count:]), settings
    return found


COMMANDS = commands()
LAUNCHES = {text: each for text, each in COMMANDS.items() if each[0].startswith("bash scripts/pretrain.sh")}
BENCHMARKS = sorted(command for command, _ in COMMANDS.values() if BENCHMARK.fullmatch(command))


def test_every_command_has_a_test():
    assert len(COMMANDS) > 30 and len(LAUNCHES) >= 5 and len(BENCHMARKS) >= 3
    here = {*BENCHMARKS, *(command for command, _ in LAUNCHES.values())}
    for command, _ in COMMANDS.values():
        runs = [test for pattern, test in ELSEWHERE.items() if re.fullmatch(pattern, command)]
        assert runs or command in here or any(re.fullmatch(p, command) for p in NOT_OURS), command
        for test in runs:
            script = re.search(r"([\w-]+)\.(?:sh|py|sbatch)", command)
            assert (script[1] if script else "seq1f1b") in (TESTS / test).read_text() or "compare" in command, command


@pytest.mark.parametrize("text", LAUNCHES)
def test_a_launcher_starts_the_ranks(text, tmp_path):
    """With enough GPUs, Transformer Engine and data; what starts ranks is a stand-in, which prints the command."""
    command, settings = LAUNCHES[text]
    for name in ("scripts", "megatron", "tools", "pretrain_gpt.py", "pretrain_hybrid.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.idx").touch()
    (tmp_path / "installed" / "transformer_engine").mkdir(parents=True)
    (tmp_path / "installed" / "transformer_engine" / "__init__.py").touch()
    installed = {"GPUS_PER_NODE": "64", "PYTHONPATH": python_path(tmp_path / "installed")}
    flags = started(command.split(), tmp_path, cwd=tmp_path, **settings | installed).flags
    assert settings.get("SEQ_LENGTH", "512") in flags or "MODEL_SIZE" in settings
    assert ("--dry-run" in flags) == (settings.get("DRY_RUN") == "1")


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_benchmark_runs(launch, command, tmp_path):
    ranks, options = BENCHMARK.fullmatch(command).groups()
    words = shlex.split(options)
    launch(int(ranks), [*words, *SHRUNK], script=ROOT / "tools" / "benchmark.py", timeout=300).check()
