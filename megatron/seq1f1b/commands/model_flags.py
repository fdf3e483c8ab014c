"""Models as flags of Megatron: presets by name, and the sizes that flags give."""

import argparse
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..arguments.megatron_run import hybrid_stages
from ..costs.model_shape import ModelShape, mamba_heads, model_shape
from ..process.flag_names import flag_of
from .parsing import MOST_LAYERS, Parser, count, count_up_to

# From a name to flags of Megatron.
PRESETS: Mapping[str, str] = MappingProxyType(tomllib.loads(Path(__file__).with_name("models.toml").read_text()))

# Sizes with Megatron's defaults: experts, latent attention, gated delta nets, Mamba-2.
_SIZES: Mapping[str, int | None] = MappingProxyType(
    {
        "num-experts": None,
        "moe-router-topk": 2,
        "moe-ffn-hidden-size": None,
        "mtp-num-layers": None,
        "moe-shared-expert-intermediate-size": None,
        "max-position-embeddings": None,
        "moe-router-num-groups": None,
        "moe-router-group-topk": None,
        "q-lora-rank": None,
        "kv-lora-rank": 32,
        "qk-head-dim": 128,
        "qk-pos-emb-head-dim": 64,
        "v-head-dim": 128,
        "linear-num-key-heads": 16,
        "linear-num-value-heads": 32,
        "linear-key-head-dim": 128,
        "linear-value-head-dim": 128,
        "linear-conv-kernel-dim": 4,
        "mamba-num-heads": None,
        "mamba-head-dim": 64,
        "mamba-num-groups": 8,
        "mamba-state-dim": 128,
    }
)
# Of what predictions and Megatron go through one by one.
_MOST_OF: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {"mtp-num-layers": count_up_to(MOST_LAYERS), "num-experts": count_up_to(100_000)}
)


def preset(name: str) -> ModelShape:
    """The model of one of PRESETS."""
    return model_of(read_model(PRESETS[name].split()))


def preset_words(name: str, sequence_length: int) -> list[str]:
    """The flags of a model to be trained."""
    words = PRESETS[name].split()
    for flag in training_flags(sequence_length, has_positions="--position-embedding-type" in words):
        words += flag.split()
    return words


def without_heads(words: Sequence[str]) -> list[str]:
    """The flags of a model without heads that predict further tokens."""
    left = list(words)
    if "--mtp-num-layers" in left:
        place = left.index("--mtp-num-layers")
        del left[place : place + 2]
    return left


def training_flags(sequence_length: int, has_positions: bool = False) -> list[str]:
    """The flags to train a preset with: rotary positions, unless it has others, 16 bit, no dropout; each item is a flag
    with its values."""
    flags = ["--untie-embeddings-and-output-weights"]
    if not has_positions:
        flags.append("--position-embedding-type rope")
    flags.append(f"--max-position-embeddings {sequence_length}")
    flags += ["--hidden-dropout 0", "--attention-dropout 0", "--bf16"]
    return flags


def add_model_flags(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """The sizes of a GPT."""
    add = parser.add_argument_group("model, as in Megatron").add_argument
    add("--num-layers", type=count_up_to(MOST_LAYERS), default=defaults["num_layers"])
    add("--hidden-size", type=count, default=defaults["hidden_size"])
    add("--num-attention-heads", type=count, default=defaults["num_attention_heads"])
    add("--ffn-hidden-size", type=count, help="default: 4 times the hidden size, 8/3 with --swiglu")
    add("--kv-channels", type=count, help="size of a head; default: hidden size / heads")
    add("--num-query-groups", type=count, help="number of KV heads; default: as many as heads")
    add("--swiglu", "--quick-geglu", action="store_true", help="a gated feed-forward block of three matrices")
    add("--vocab-size", type=count, default=defaults["vocab_size"], help="padded")


def add_every_model_flag(parser: argparse.ArgumentParser) -> None:
    """All flags of Megatron that change the costs of a model."""
    add_model_flags(parser, num_layers=None, hidden_size=None, num_attention_heads=None, vocab_size=51200)
    add = parser.add_argument
    for name, default in _SIZES.items():
        add(f"--{name}", type=_MOST_OF.get(name, count), default=default)
    add("--moe-layer-freq", type=_layer_frequency, default=1)
    add("--window-attn-skip-freq", type=_layer_frequency)
    add("--window-size", type=_window)
    add("--activation-func-clamp-value", type=float)
    add("--hybrid-layer-pattern")
    add("--position-embedding-type", default="learned_absolute")
    for name in ("group-query-attention", "multi-latent-attention", "qk-layernorm"):
        add(f"--{name}", action="store_true")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")


def _window(text: str) -> tuple[int, ...]:
    """Tokens before and after the query, in the form of Megatron's parser: 128,0 or (128,0)."""
    # No sequence is longer than the largest number here, so that wider windows are all alike.
    return tuple(min(int(number), 10**9) for number in text.strip("()").split(","))


def _layer_frequency(text: str) -> int | list[int]:
    """A period in layers, or a list of 0 and 1 in the form of Megatron's parser: [0,1,1] or [0]*1+[1]*2."""
    if text.isdigit() and int(text):
        return int(text)
    entries_of_all: list[int] = []
    for part in text.replace(" ", "").strip("()").split("+"):
        entries, _, times = part.partition("*")
        if not re.fullmatch(r"\[\d+(,\d+)*\]", entries) or not (times or "1").isdigit():
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a list such as [0]*1+[1]*47")
        repeats = min(int(times or 1), MOST_LAYERS + 1)
        entries_of_all += repeats * [int(number) for number in entries[1:-1].split(",")]
    if len(entries_of_all) > MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than {MOST_LAYERS} layers")
    return entries_of_all


def read_model(words: Sequence[str]) -> argparse.Namespace:
    """Read the flags of a model in a launch and ignore the others."""
    parser = Parser(None, add_help=False)
    add_every_model_flag(parser)
    return parser.parse_known_args(words)[0]


def model_of(launch: argparse.Namespace) -> ModelShape:
    """The model of a launch. Raises ValueError if a size is missing, or sizes do not go together."""
    return model_shape(settings_of(launch))


def settings_of(launch: argparse.Namespace) -> dict[str, Any]:
    """The settings of a launch with Megatron's defaults in place. Raises ValueError as `model_of`."""
    sizes = vars(launch)
    sizes = sizes | {"num_layers": len("".join(hybrid_stages(sizes))) or sizes["num_layers"]}
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if sizes[name] is None:
            raise ValueError(f"{flag_of(name)} is missing: give the sizes of the model, or --model")
    hidden = launch.hidden_size
    heads = launch.num_attention_heads
    groups = launch.num_query_groups
    if launch.kv_channels is None and hidden % heads:
        raise ValueError(f"--hidden-size {hidden} is no multiple of --num-attention-heads {heads}; give --kv-channels")
    if groups is not None and heads % groups:
        raise ValueError(f"--num-attention-heads {heads} is no multiple of --num-query-groups {groups}; change one")
    if sizes.get("num_experts"):
        _check_experts(launch, sizes["num_layers"])
    if "M" in (sizes.get("hybrid_layer_pattern") or ""):
        _check_mamba(launch)
    usual_ffn_size = 4 * hidden
    if launch.swiglu:  # as Megatron rounds it
        usual_ffn_size = int(4 * hidden * 2 / 3) // 64 * 64
    return sizes | {
        "ffn_hidden_size": launch.ffn_hidden_size or usual_ffn_size,
        "kv_channels": launch.kv_channels or hidden // heads,
        "padded_vocab_size": launch.vocab_size,
        # plan-split takes --num-query-groups alone.
        "group_query_attention": sizes.get("group_query_attention", groups is not None),
    }


def _check_mamba(launch: argparse.Namespace) -> None:
    """Raise ValueError for sizes of Mamba layers that do not go together."""
    if launch.mamba_num_heads is None and 2 * launch.hidden_size % launch.mamba_head_dim:
        raise ValueError(
            f"twice --hidden-size {launch.hidden_size} is no multiple of --mamba-head-dim {launch.mamba_head_dim}; "
            "change one, or give --mamba-num-heads"
        )
    heads = mamba_heads(vars(launch))
    groups = launch.mamba_num_groups
    if heads % groups:
        raise ValueError(f"{heads} heads of Mamba are no multiple of --mamba-num-groups {groups}; change one")


def _check_experts(launch: argparse.Namespace, num_layers: int) -> None:
    """Raise ValueError for sizes of experts that do not go together."""
    experts = launch.num_experts
    topk = launch.moe_router_topk
    if topk > experts:
        raise ValueError(f"--moe-router-topk {topk} is more than --num-experts {experts}")
    groups = launch.moe_router_num_groups or 1
    chosen = launch.moe_router_group_topk or 1
    if experts % groups or chosen > groups or topk > experts // groups * chosen:
        raise ValueError(
            f"--moe-router-num-groups {groups} with --moe-router-group-topk {chosen} gives no --moe-router-topk {topk} "
            f"of --num-experts {experts}; change one"
        )
    frequency = launch.moe_layer_freq
    if isinstance(frequency, list) and len(frequency) != num_layers:
        raise ValueError(f"--moe-layer-freq has {len(frequency)} entries, --num-layers is {num_layers}")
