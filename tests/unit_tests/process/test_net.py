"""What ends a program is one sentence, with the traceback of what is not a plain mistake in a file."""

import re
import runpy
import subprocess
import sys
import weakref
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megatron.seq1f1b.arguments import parse_options
from megatron.seq1f1b.process import causes, net, sentences
from megatron.seq1f1b.process.causes import in_plain_words
from megatron.seq1f1b.process.job_variables import check_job_variables
from megatron.seq1f1b.process.net import Net
from megatron.seq1f1b.process.sentences import sentence_of


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """Where tracebacks are written; this process does not end after a failure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(net, "_end_soon", lambda: None)


def raised(function, *arguments):
    try:
        function(*arguments)
    except BaseException as error:
        return error


MEGATRON = """
def validate_args(args):
    assert args.hidden_size % args.num_attention_heads == 0
"""


def load_checkpoint(args, error):
    raise error


ARGS = Namespace(hidden_size=65, num_attention_heads=4, load="/saved", data_cache_path="/nowhere/cache")
FLAGS = {name: f"--{name.replace('_', '-')}" for name in vars(ARGS)}
GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:39336. This is typical. GLHF! 🏖️"
LATE = RuntimeError(
    "0RECV_B0.0 did not come: [/gloo/buffer.cc:76] Timed out waiting 600000ms for recv operation to complete"
)
REMOTE = RuntimeError("ranks: [0]\nTraceback (most recent call last): (RANK 0)\n  File 1\nKeyError: 'gone'\n")


@pytest.mark.parametrize(
    "error, sentence",
    [
        (raised(load_checkpoint, ARGS, KeyError("args")), "loading the checkpoint in /saved failed: KeyError: 'args'"),
        (raised(load_checkpoint, ARGS, REMOTE), "loading the checkpoint in /saved failed: KeyError: 'gone'"),
        (raised(open, "/no/file"), "/no/file: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            raised(load_checkpoint, ARGS, OSError(28, "No space left")),
            "loading the checkpoint in /saved failed: No space",
        ),
        (raised(int, "many\n  lines"), "invalid literal for int() with base 10: 'many\\n lines'"),
        (
            RuntimeError(GLOO),
            "the connection to another rank on 10.0.0.7 broke, so that rank has ended; its own last w",
        ),
        (
            LATE,
            "0RECV_B0.0 did not come: nothing moved for 600 s; another rank hangs, or needs a longer --distributed-",
        ),
        (MemoryError(), "the memory of this host is full; look at the sizes of the model"),
        (RuntimeError("can't start new thread"), "no thread can be started, for want of memory or by the limit of ul"),
        (StopIteration(), "a data iterator ended early; give more data"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError("x " * 999), f"{'x ' * 200} ..."),
        (ModuleNotFoundError("no", name="datasets"), "the package datasets is missing; pip install"),
        (KeyboardInterrupt(), "interrupted"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_error_is_one_sentence(error, sentence):
    assert sentence_of(error).startswith(sentence) and "\n" not in sentence_of(error)


def test_a_failed_check_without_words_is_shown_with_its_flags(tmp_path):
    (tmp_path / "checks.py").write_text(MEGATRON)
    error = raised(runpy.run_path(tmp_path / "checks.py")["validate_args"], ARGS)
    assert sentence_of(error, FLAGS) == (
        "checking the flags failed: assert hidden_size % num_attention_heads == 0 "
        "(--hidden-size 65, --num-attention-heads 4) does not hold"
    )


CHECKS = """
import json
def validate_args(args, hidden_size):
    if args.num_attention_heads > 3:
        raise ValueError(
            f"the size {hidden_size} is wrong."
        )
def read(args):
    with open(args.load) as file:
        (value,) = json.load(file)
"""


def test_a_check_with_words_names_the_flags_that_these_lack(tmp_path):
    (tmp_path / "checks.py").write_text(CHECKS)
    error = raised(runpy.run_path(tmp_path / "checks.py")["validate_args"], ARGS, 65)
    named = "the size 65 is wrong (--hidden-size 65, --num-attention-heads 4)"
    assert sentence_of(error, FLAGS) == f"checking the flags failed: {named}"


NAMED = {name: f"--{name.replace('_', '-')}" for name in ("num_layers", "num_experts", "data_path")}


@pytest.mark.parametrize(
    "words, said",
    [
        ("num_layers (3) must match args.num_layers.", "--num-layers (3) must match --num-layers."),
        ("self.config.num_layers=3 is too small", "--num-layers=3 is too small"),
        ("num_moe_experts must be given", "--num-experts must be given"),
        ("num_layers_of_all is no flag", "num_layers_of_all is no flag"),
        ("'num_layers', /of/num_layers, num_layers(), model.num_layers, num_layers.count", None),
    ],
)
def test_names_of_megatron_become_flags(words, said):
    assert sentence_of(RuntimeError(words), NAMED) == (said or words)


def test_values_that_the_words_have_are_not_repeated(tmp_path):
    (tmp_path / "checks.py").write_text(
        "def check(args):\n    assert args.num_layers > 4, f'num_layers ({args.num_layers}) is too small'\n"
    )
    check = runpy.run_path(tmp_path / "checks.py")["check"]
    assert sentence_of(raised(check, Namespace(num_layers=3)), NAMED) == "--num-layers (3) is too small"


def test_a_path_in_a_list_is_named_with_its_flag():
    def check(args):
        raise ValueError(f"there is nothing at {args.data_path[1]}")

    error = raised(check, Namespace(data_path=["0.5", "/of/mine"]))
    assert sentence_of(error, NAMED) == "there is nothing at /of/mine (in --data-path)"


def test_the_system_says_nothing_so_flags_around_it_are_named(tmp_path):
    (tmp_path / "checks.py").write_text("import signal\ndef handle(load):\n    signal.signal(load, print)\n")
    handle = runpy.run_path(tmp_path / "checks.py")["handle"]
    assert sentence_of(raised(handle, 9), FLAGS) == "Invalid argument (--load 9)"


def test_a_variable_with_the_name_of_a_flag_may_be_another(tmp_path):
    (tmp_path / "checks.py").write_text("def look_up(args, load):\n    return {}[load]\n")
    look_up = runpy.run_path(tmp_path / "checks.py")["look_up"]
    assert sentence_of(raised(look_up, ARGS, "/saved"), FLAGS) == "KeyError: '/saved' (--load /saved)"
    assert sentence_of(raised(look_up, ARGS, "train"), FLAGS) == "KeyError: 'train'"


def test_a_file_is_named_with_its_flag(tmp_path):
    """Also one whose content is at fault, which parsers do not name."""
    (tmp_path / "checks.py").write_text(CHECKS)
    read = runpy.run_path(tmp_path / "checks.py")["read"]
    (tmp_path / "words").write_text("words")
    (tmp_path / "empty").write_text("[]")
    for file, words in (
        ("none", "No such file or directory"),
        ("words", "Expecting value: line 1 column 1 (char 0)"),
        ("empty", "not enough values to unpack (expected 1, got 0)"),
    ):
        args = Namespace(load=str(tmp_path / file))
        assert sentence_of(raised(read, args), FLAGS) == f"--load {args.load}: {words}"


def test_a_file_in_a_folder_is_named_with_the_flag_of_the_folder():
    error = raised(load_checkpoint, ARGS, FileNotFoundError(2, "No such file", "/nowhere/cache/index"))
    words = "/nowhere/cache/index (in --data-cache-path): No such file"
    assert sentence_of(error, FLAGS) == f"loading the checkpoint in /saved failed: {words}"


def caught(error) -> int:
    """The code with which the program ends."""
    with pytest.raises(SystemExit) as end:
        Net().caught(type(error), error, error.__traceback__)
    return end.value.code


@pytest.mark.parametrize("rank, local_rank, seconds", [("0", "0", 0), ("8", "0", 5), ("9", "1", 10), (None, "1", 5)])
def test_a_rank_that_has_joined_nobody_speaks_last(monkeypatch, capfd, rank, local_rank, seconds):
    """Meanwhile what started all of them ends it, if the first rank has made the same mistake."""
    waited = []

    def sleep(time: float) -> None:
        assert capfd.readouterr().err == ""
        waited.append(time)

    monkeypatch.setattr(net.time, "sleep", sleep)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    wrong = {"WORLD_SIZE": "16", "RANK": rank or "0", "MASTER_PORT": "x"}
    assert caught(raised(check_job_variables, wrong, [])) == 2
    assert sum(waited) == seconds
    assert capfd.readouterr().err.startswith("error: MASTER_PORT=x in the environment is not a whole number")


ERROR = raised(load_checkpoint, ARGS, KeyError("args"))


def test_the_sentence_names_the_file_of_the_traceback(tmp_path, monkeypatch, capfd):
    """But for a mistake that we find; a full disk does not hide the sentence."""
    caught(raised(parse_options, {"sequence_splitz": 4}))
    assert capfd.readouterr().err.count("\n") == 1 and not [*tmp_path.iterdir()]
    assert caught(ERROR) == 2
    printed = capfd.readouterr().err
    file = re.fullmatch(r"error: .* failed: KeyError: 'args'; the traceback is in (\S+)\.\n", printed)[1]
    assert "line" in Path(file).read_text() and Path(file).parent == tmp_path
    monkeypatch.setattr(
        sentences.tempfile, "NamedTemporaryFile", Mock(side_effect=OSError(28, "No space left on device"))
    )
    caught(ERROR)
    ending = "KeyError: 'args'; the traceback is in no file, since none can be written.\n"
    assert capfd.readouterr().err.endswith(ending)


def write(path: Path) -> None:
    with path.open("wb") as file, open("/dev/full", "wb", buffering=0) as full:
        assert file.name != full.name
        full.write(b"x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_is_named_with_its_file(tmp_path, monkeypatch):
    """Of the files that were open, the one whose disk has least room; the room of this machine's does not matter."""
    room = lambda folder: SimpleNamespace(free=2**20 if Path(folder) == Path("/dev") else 2**30)  # noqa: E731
    monkeypatch.setattr(causes.shutil, "disk_usage", room)
    error = raised(write, tmp_path / "first")
    assert sentence_of(error).startswith("/dev/full: No space left on device; /dev has 1 MiB free: make room, ")
    assert str(error) == "[Errno 28] No space left on device: '/dev/full'", "in a traceback, too"


@pytest.mark.parametrize("code", ["import wrapped.gone", "import wrapped; wrapped.gone"])
def test_a_file_that_hides_a_package_is_named(tmp_path, monkeypatch, code):
    installed, hiding = tmp_path / "installed", tmp_path / "hiding"
    for folder in (installed / "wrapped", installed / "wrapped-1.dist-info", hiding / "wrapped"):
        folder.mkdir(parents=True)
    (installed / "wrapped-1.dist-info" / "METADATA").write_text("Name: wrapped\nVersion: 1\n")
    (installed / "wrapped-1.dist-info" / "top_level.txt").write_text("wrapped\n")
    for folder in (installed, hiding):
        (folder / "wrapped" / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(folder)
    sentence = sentence_of(raised(exec, code))
    sys.modules.pop("wrapped")
    assert sentence == (
        f"{hiding}/wrapped/__init__.py is imported as wrapped and hides {installed}/wrapped; take its folder out of "
        "PYTHONPATH, or rename it"
    )


def test_a_file_that_hides_a_module_of_python_is_named(tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    sentence = sentence_of(raised(exec, "import colorsys; colorsys.rgb_to_hsv"))
    sys.modules.pop("colorsys")
    assert sentence.startswith(f"{tmp_path}/colorsys.py is imported as colorsys and hides ")


def test_after_the_first_step_a_lost_rank_is_still_a_sentence(monkeypatch, capfd):
    monkeypatch.setattr(net, "_first_step_is_over", lambda: True)
    assert caught(RuntimeError(GLOO)) == 2
    assert re.fullmatch(
        r"error: the connection to another rank .*; the traceback is in \S+\.\n", capfd.readouterr().err
    )


def test_after_the_first_step_a_traceback_is_printed(monkeypatch, capfd):
    monkeypatch.setattr(net, "_first_step_is_over", lambda: True)
    Net().caught(type(ERROR), ERROR, ERROR.__traceback__)
    assert capfd.readouterr().err.startswith("Traceback (most recent call last)")


FAILED_SAVE = """
import io
import sys
from megatron.seq1f1b.process.net import Net

def write():
    tensor = io.BytesIO(b"0")
    view = tensor.getbuffer()
    try:
        raise OSError(28, "No space left on device")
    except OSError as error:
        kept = error  # and its traceback keeps this frame

sys.excepthook = Net().caught
write()
raise ValueError("the checkpoint was not saved")
"""


def test_garbage_that_python_cannot_collect_is_left_alone(tmp_path):
    """Python 3.12.1 crashes where it collects such a view of a file in memory, at its end at the latest."""
    (tmp_path / "save.py").write_text(FAILED_SAVE)
    ended = subprocess.run([sys.executable, "save.py"], capture_output=True, text=True)
    assert ended.stderr.startswith("error: the checkpoint was not saved")
    assert ended.returncode == 2


def test_a_rank_without_memory_lets_the_step_go_before_it_speaks(monkeypatch, capfd):
    held = []

    class Activation:
        pass

    def train_step(activation):
        held.append(weakref.ref(activation))
        raise MemoryError

    described = net._failure_of

    def scarce(*arguments):
        if held[0]() is not None:
            raise MemoryError
        return described(*arguments)

    monkeypatch.setattr(net, "_failure_of", scarce)
    assert caught(raised(lambda: train_step(Activation()))) == 2
    assert capfd.readouterr().err.startswith("error: running a step failed: the memory of this host is full; look at ")


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
            "a tensor of 3,725.3 GiB does not fit into the memory of this host; look at the sizes of the model and of "
            "a micro-batch",
        ),
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 16777216 bytes. Error code 12 (Cannot "
            "allocate memory)",
            "a tensor of 16.0 MiB does not fit into the memory of this host; look at the sizes of the model and of a "
            "micro-batch",
        ),
        (
            "[enforce fail at /gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: ib9",
            "ib9 (GLOO_SOCKET_IFNAME) is no network interface of this host; ip addr lists them",
        ),
        (
            "NCCL error in: /pytorch/ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_DEBUG=WARN for details)\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000",
            "ranks 1 and 0 use one GPU; what starts the ranks, such as torchrun, must set LOCAL_RANK to their number "
            "on their host",
        ),
        (
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?",
            "LOCAL_RANK is the number of no GPU of this host; start as many ranks on it as it has GPUs, or as "
            "CUDA_VISIBLE_DEVICES lists",
        ),
        (
            "Global shape mismatch for loaded (torch.Size([96, 64])) and expected ((96, 32)) tensor for key "
            "embedding.word_embeddings.weight",
            "embedding.word_embeddings.weight has the shape [96, 64] in --load, and [96, 32] in this launch; give the "
            "flags of the model that was saved (--hidden-size, --num-layers, --swiglu, ...)",
        ),
        (
            "Global shape mismatch for loaded (torch.Size([4096])) and expected ((2048,)) tensor for key "
            "optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.exp_avg",
            "--load has the state of the optimizer for other parallel sizes or another schedule; take those, or save "
            "it with --dist-ckpt-optim-fully-reshardable",
        ),
        (
            "OptimizerParamScheduler: class input value 40 and checkpointvalue 20 for total number of iterations do "
            "not match",
            "--load has 20 as total number of iterations, and this launch 40; give the flags of the saved run "
            "(--train-iters, --global-batch-size, --lr-decay-iters, ...), or one of --override-opt-param-scheduler and "
            "--use-checkpoint-opt-param-scheduler",
        ),
    ],
    ids=["memory", "less memory", "interface", "one GPU", "no GPU", "shape", "layout", "schedule"],
)
def test_words_of_libraries_become_those_of_the_user(text, words):
    assert in_plain_words(text) == words
