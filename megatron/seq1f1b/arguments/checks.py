"""Checks of flags for mistakes that neither Megatron nor a library notices before they cost work.

Tested in functional_tests/test_bad_input.py by test_one_sentence.
"""

import math
import os
import stat
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from ..files.corpus import check_corpus
from ..files.reading import read_text
from ..files.typed import named_by, read_json, with_way_out
from ..process.flag_names import flag_of
from ..process.hub import spare_hub
from .flags import TRACED_ITERATIONS, check_needed

# Sizes of a model, a batch and a cluster.
_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "micro_batch_size",
    "global_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "log_interval",
    "distributed_timeout_minutes",
    "ckpt_step",
    "exit_duration_in_mins",  # 0 is never
    "rotary_seq_len_interpolation_factor",
    "window_attn_skip_freq",
)
# No size, and no number of iterations, samples or tokens, is larger; this leaves room for products of some of them,
# which torch keeps in 64 bits.
_MOST = 10**15
# Of layers, experts, processes and threads that Megatron makes one by one, nobody means more, and a host may not
# survive as many processes.
_MOST_OF = MappingProxyType(
    {
        "num_layers": 10_000,
        "mtp_num_layers": 10_000,
        "num_experts": 100_000,
        "num_workers": 1024,
        "num_dataset_builder_threads": 1024,
        "dist_ckpt_workers": 1024,
        "distributed_timeout_minutes": 1_000_000,  # a time that libraries count in nanoseconds
    }
)
# Those of Megatron that take the files --vocab-file and --merge-file.
_TOKENIZERS_OF_FILES = ("BertWordPieceCase", "BertWordPieceLowerCase", "GPT2BPETokenizer", "HuggingFaceTokenizer")
_CORPORA = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
# Folders into which a rank of every node writes.
_FOLDERS_OF_NODES = (
    "save",
    "pipeline_trace",
    "non_persistent_global_ckpt_dir",
    "non_persistent_local_ckpt_dir",
    "logits_save_dir",
    "config_logger_dir",
)


def check_late_mistakes(args: Namespace) -> None:
    """Raise ValueError for mistakes in flags that would show late, or never."""
    _check_numbers(args)
    check_needed(args)
    _check_checkpoint(args)
    _check_model(args)
    _check_trace_and_rehearsal(args)


def _check_numbers(args: Namespace) -> None:
    """Raise ValueError for an infinite number or NaN: Megatron would train on NaN losses."""
    for name, value in vars(args).items():
        if not isinstance(value, float) or math.isfinite(value):
            continue
        turns_clipping_off = name == "clip_grad" and value == math.inf
        if not turns_clipping_off:
            raise ValueError(f"{flag_of(name)} {value} must be a number")


def _check_checkpoint(args: Namespace) -> None:
    """Raise ValueError for a checkpoint that Megatron would not load, and train without it."""
    load = getattr(args, "load", None)
    step = getattr(args, "ckpt_step", None)
    if step is not None and not load and not getattr(args, "pretrained_checkpoint", None):
        raise ValueError(f"--ckpt-step {step} needs --load")
    if load and os.path.isfile(load):
        raise ValueError(f"--load {load} is a file; give the folder that --save named")


def _check_model(args: Namespace) -> None:
    """Raise ValueError for flags with which Megatron would train another model than is meant, or NaN."""
    has_rotary_positions = getattr(args, "position_embedding_type", None) == "rope"
    if has_rotary_positions and getattr(args, "rotary_percent", None) == 0:  # it would train without positions
        raise ValueError("--rotary-percent 0.0 must be above 0")
    base = getattr(args, "rotary_base", None)
    if base is not None and base <= 0:  # it would train on NaN
        raise ValueError(f"--rotary-base {base} must be above 0")
    for end in ("first", "last"):  # it would train a model of another depth
        layers = getattr(args, f"decoder_{end}_pipeline_num_layers", None)
        if layers and layers > args.num_layers:
            flag = f"--decoder-{end}-pipeline-num-layers"
            raise ValueError(f"{flag} {layers} must be at most --num-layers {args.num_layers}")


def _check_trace_and_rehearsal(args: Namespace) -> None:
    """Raise ValueError for a trace that no iteration would write, or a report without a rehearsal."""
    if args.pipeline_trace is not None:
        first = min(args.pipeline_trace_iterations or TRACED_ITERATIONS)
        ends = {"--train-iters": args.train_iters}
        if not args.load:  # else the iteration from which the interval counts is not known yet
            ends["--exit-interval"] = args.exit_interval
        for flag, last in ends.items():
            if last and first > last:
                raise ValueError(f"--pipeline-trace-iterations {first} is beyond {flag} {last}; choose earlier ones")


def check_sizes(args: Namespace) -> None:
    """Raise ValueError for a size below 1, a number that is too large for torch, a corpus without a path, or a batch
    that does not divide: Megatron would blame the data, divide by 0, name no flag, or not end."""
    _check_ranges(args)
    _check_empty_values(args)
    _check_query_groups(args)
    replicas = _replicas_of(args)
    _check_ranks_of_experts(args)
    _check_virtual_stages(args)
    _check_batch(args, replicas)


def _check_ranges(args: Namespace) -> None:
    for name, value in vars(args).items():
        most = _MOST_OF.get(name, _MOST)
        if isinstance(value, int) and abs(value) > most:
            raise ValueError(f"{flag_of(name)} {value} is too large; the most is {most:,}")
    for name in _SIZES:
        size = getattr(args, name, None)
        if isinstance(size, int) and size < 1:  # a list says it layer by layer
            raise ValueError(f"{flag_of(name)} {size} must be a whole number from 1 on")


def _check_empty_values(args: Namespace) -> None:
    if getattr(args, "hybrid_layer_pattern", None) == "":
        raise ValueError("--hybrid-layer-pattern has no value; give a symbol for each layer")
    for name in _CORPORA:
        paths = getattr(args, name, None)
        if paths is not None and ("" in paths or not paths):
            raise ValueError(f"{flag_of(name)} has no value; give it the path of a .bin and .idx pair")


def _replicas_of(args: Namespace) -> int:
    """The number of data-parallel ranks. Raises ValueError if the other parallel sizes do not divide the ranks."""
    sizes = {
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
    }
    return _ranks_for_each(sizes, args.world_size)


def _ranks_for_each(sizes: Mapping[str, int], ranks: int) -> int:
    """The number of ranks by the product of parallel sizes, which are given by their flags. Raises ValueError if it
    does not divide that."""
    product = math.prod(sizes.values())
    if ranks % product:
        factors = " times ".join(f"{flag} {size}" for flag, size in sizes.items())
        raise ValueError(f"{factors} is {product}, which does not divide the number of ranks, {ranks}; change one")
    return ranks // product


def _check_query_groups(args: Namespace) -> None:
    """Raise ValueError for KV heads that do not divide the heads: Megatron fails in its first step. Other layers than
    those of plain attention may not read these flags."""
    is_plain = not args.multi_latent_attention and getattr(args, "heterogeneous_layers_config_path", None) is None
    heads = args.num_attention_heads
    if args.group_query_attention and is_plain and heads and heads % args.num_query_groups:
        raise ValueError(
            f"--num-attention-heads {heads} is no multiple of --num-query-groups {args.num_query_groups}; change one"
        )


def _check_ranks_of_experts(args: Namespace) -> None:
    """Raise ValueError if the parallel sizes of experts do not divide the ranks."""
    sizes = {
        "--expert-model-parallel-size": args.expert_model_parallel_size,
        "--expert-tensor-parallel-size": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
    }
    _ranks_for_each(sizes, args.world_size)


def _check_batch(args: Namespace, replicas: int) -> None:
    """Raise ValueError for a batch that replicas cannot share in micro-batches; one that changes in a run is Megatron's
    to check."""
    batch = args.global_batch_size
    changes = getattr(args, "step_batch_size_schedule", None) or args.decrease_batch_size_if_needed
    if batch is None or args.micro_batch_size is None or changes:
        return
    at_once = args.micro_batch_size * replicas
    if batch % at_once:
        below = batch - batch % at_once
        near = f"{below} or {below + at_once}" if below else f"{at_once}"
        raise ValueError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {args.micro_batch_size} times "
            f"{replicas} data-parallel rank(s); take {near}, or another --micro-batch-size"
        )


def _check_virtual_stages(args: Namespace) -> None:
    """Raise ValueError for more stages than there are layers, embedding and loss: Megatron would build all of them."""
    chunks = args.num_virtual_stages_per_pipeline_rank
    layers = args.num_layers
    if chunks is None or layers is None:
        return
    ranks = args.pipeline_model_parallel_size
    if chunks > 1 and chunks * ranks > layers + 2:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {chunks} makes {chunks * ranks} stages of --num-layers {layers}; "
            f"take {max(1, layers // ranks)} or fewer"
        )


def check_places(args: Namespace) -> None:
    """Raise ValueError for a folder, by the flag that names it, into which this rank will not be able to write, and for
    a tokenizer's file that it cannot read."""
    check_no_pipes(args)
    given = vars(args)
    for name in ("save", "load", "pretrained_checkpoint"):
        if given.get(name) == "":  # of a variable that is not set: Megatron would save nothing, and load from here
            raise ValueError(f"{flag_of(name)} has no value; drop it, or name a folder")
    written = {"--dry-run-output": args.dry_run_output}
    if not args.dry_run:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            written |= _folders_of_a_node(given)
        if args.rank == args.world_size - 1:
            written |= _folders_of_last_rank(given)
    _require_writable(written)
    if not args.dry_run and given.get("tokenizer_type") in _TOKENIZERS_OF_FILES:
        _check_tokenizer_files(args)
        spare_hub(args.tokenizer_type, args.tokenizer_model)
    if not args.dry_run and args.rank == 0:
        _check_corpora(given)
    if given.get("wandb_project") and not given.get("wandb_save_dir") and not given.get("save"):
        raise ValueError(f"--wandb-project {args.wandb_project} needs a folder to write to; add --wandb-save-dir")


def _folders_of_a_node(given: Mapping[str, Any]) -> dict[str, Any]:
    """The folders into which a rank of every node writes, by flag. Megatron fails at its first save only, and a trace
    is written after the third step."""
    folders = {flag_of(name): given.get(name) for name in _FOLDERS_OF_NODES}
    recorder = given.get("flight_recorder_dump_path")
    if recorder:  # a folder, or what the names of its files begin with
        is_folder = os.path.isdir(recorder)
        folders["--flight-recorder-dump-path"] = recorder if is_folder else Path(recorder).absolute().parent
    return folders


def _folders_of_last_rank(given: Mapping[str, Any]) -> dict[str, Any]:
    """The folders into which only the last rank writes, by flag."""
    folders = {"--tensorboard-dir": given.get("tensorboard_dir")}
    if given.get("wandb_project"):
        folders["--wandb-save-dir"] = given.get("wandb_save_dir")
    if given.get("record_memory_history"):
        folders["--memory-snapshot-path"] = Path(given["memory_snapshot_path"]).absolute().parent
    return folders


def check_no_pipes(args: Namespace) -> None:
    """Raise ValueError for a flag of Megatron that names a pipe or a device: a library would wait for somebody to write
    to it, or read it for ever. Our own flags may, and have a type of their own."""
    for name, value in vars(args).items():
        if isinstance(value, str) and _is_pipe_or_device(value):
            raise ValueError(f"{flag_of(name)} {value} is a pipe or a device; name a file or a folder")


def _is_pipe_or_device(text: str) -> bool:
    try:
        mode = os.stat(text).st_mode
    except (OSError, ValueError):  # there is none of this name
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _check_tokenizer_files(args: Namespace) -> None:
    """Raise ValueError for a file of the tokenizer that cannot be read: its library would first look for its name at a
    hub, for most of a minute where there is no network."""
    for name in ("vocab_file", "merge_file"):
        file = getattr(args, name)
        if file:
            with named_by(flag_of(name)):
                read_text(file)
    if args.vocab_file and args.tokenizer_type == "GPT2BPETokenizer":
        with named_by("--vocab-file"):
            read_json(args.vocab_file, dict[str, int])


class _PathsOfSplits(Struct):
    """The paths of corpora, each with a weight before it or none, of a text or a list; null: there are none."""

    train: str | list[str | float] | None
    valid: str | list[str | float] | None
    test: str | list[str | float] | None


def _words_of(file: str) -> list[str]:
    """The paths of corpora, and weights, in the file of --data-args-path."""
    words = read_text(file).split()
    if not words:
        raise ValueError(f"{file}: it has no paths; give those of .bin and .idx pairs")
    return words


def _words_of_splits(file: str) -> list[str]:
    """The paths of corpora, and weights, in the file of --per-split-data-args-path."""
    way_out = 'give {"train": "paths", "valid": "paths", "test": "paths"}, of .bin and .idx pairs; null for none'
    try:
        splits = asdict(read_json(file, _PathsOfSplits))
    except ValueError as error:
        raise with_way_out(error, way_out) from None
    words: list[str] = []
    for name, paths in splits.items():
        found = paths.split() if isinstance(paths, str) else paths
        if found == []:
            raise ValueError(f"{file}: {name}: it has no paths; {way_out}")
        words += map(str, found or ())
    return words


# Flags that name a file with the paths of corpora, and what reads it.
_LISTS_OF_CORPORA: Mapping[str, Callable[[str], list[str]]] = MappingProxyType(
    {"data_args_path": _words_of, "per_split_data_args_path": _words_of_splits}
)


def _check_corpora(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a corpus that is damaged. What has no index here is another kind of data, or Megatron names
    it; in the file of a flag it has to be there."""
    paths = [(name, path) for name in _CORPORA for path in given.get(name) or ()]
    for name, words_in in _LISTS_OF_CORPORA.items():
        file = given.get(name)
        if not file or "://" in file:  # in a store that Megatron opens
            continue
        with named_by(flag_of(name)):
            words = words_in(file)
            _check_corpora_exist(file, words)
        paths += [(name, word) for word in words]
    for name, path in paths:
        if os.path.isfile(f"{path}.idx"):
            with named_by(flag_of(name)):
                check_corpus(path)


def _check_corpora_exist(file: str, words: Sequence[str]) -> None:
    for word in words:
        if "://" in word or _is_number(word):  # in a store, or a weight
            continue
        if not any(os.path.exists(word + ending) for ending in ("", ".idx", ".bin")):
            raise ValueError(
                f"{file}: there is no corpus {word}; give the path of a .bin and .idx pair, without endings"
            )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _require_writable(folders: Mapping[str, Any]) -> None:
    """Raise ValueError for a folder, by the flag that names it, into which nothing can be written."""
    for flag, path in folders.items():
        if not path or "://" in str(path):
            continue
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(b"\0")
                file.flush()
        except OSError as error:
            raise ValueError(f"{flag} {path} cannot be written ({error.strerror}); give another folder") from None
