"""What benchmarks find and choose: the longest sequence, its picture, and a GPU for every rank."""

import pytest
import torch

from benchmark_longest import Step, longest, parse, plot, table
from benchmarking.device import use_own_gpu


@pytest.mark.parametrize("start", [16, 512, 20000])
@pytest.mark.parametrize("most", [16, 100, 1000, 12345])
def test_the_longest_is_found_from_any_start(start, most):
    tried = []

    def try_length(length):
        tried.append(length)
        return Step(length, 1.0, 1.0, 1) if length <= most else None

    found = longest(try_length, start, 0.1).length
    assert found <= most < found + max(32, 0.1 * found + 16)
    assert all(length % 16 == 0 for length in tried) and len(tried) == len(set(tried))


def test_the_table_and_the_picture_show_each_method(tmp_path, monkeypatch):
    monkeypatch.setitem(pytest.importorskip("matplotlib").rcParams, "svg.fonttype", "none")
    found = {"Megatron's": Step(1000, 1.0, 3.0, 2**20), "ours": Step(5000, 1.0, 9.0, 2**20)}
    assert table(found).splitlines()[-1] == "| ours | 5,000 | 5.0 | 9 s | 1 MiB |"
    plot(found, parse(["--output", str(tmp_path / "a.svg")]))
    assert ">5,000<" in (tmp_path / "a.svg").read_text()


def test_a_rank_takes_the_gpu_of_its_number(monkeypatch):
    """A single process, which has none, takes the first."""
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for is_available, ranks in ((False, {"LOCAL_RANK": "1"}), (True, {}), (True, {"LOCAL_RANK": "1"})):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_available=is_available: is_available)
        with monkeypatch.context() as patch:
            for name, number in ranks.items():
                patch.setenv(name, number)
            use_own_gpu()
    assert taken == [0, 1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SystemExit, match="2 are visible: use --nproc-per-node 2 or less"):
        use_own_gpu()
