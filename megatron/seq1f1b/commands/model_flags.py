"""Models as flags of Megatron: presets by name, and the sizes that flags give."""

import argparse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..arguments.megatron_run import hybrid_stages
from ..planning.costs.model_shape import ModelShape
from ..planning.model_sizes import model_shape
from .parsing import MOST_LAYERS, count, count_up_to, read_known

_MIXTURE = (
    "--swiglu --disable-bias-linear --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3"
)
_QWEN = (
    "--qk-layernorm --kv-channels 128 --group-query-attention --num-query-groups 4 --num-experts 128 "
    f"--moe-router-topk 8 {_MIXTURE}"
)


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int = 32768) -> str:
    """The sizes of the papers: a feed-forward block of four times the hidden size, heads that share it."""
    return f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --vocab-size {vocabulary}"


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> str:
    sizes = f"{_gpt(layers, hidden, heads, 128256)} --ffn-hidden-size {ffn} --group-query-attention"
    return f"{sizes} --num-query-groups 8 --swiglu --disable-bias-linear"


PRESETS: Mapping[str, str] = MappingProxyType(
    {
        # arXiv 2406.03488; scripts/models.sh has the same.
        "2.7b": _gpt(32, 2560, 32),
        "7b": _gpt(32, 4096, 32),
        "13b": _gpt(40, 5120, 40),
        "30b": _gpt(64, 6144, 64),
        # arXiv 2407.21783, table 3.
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248),
        # arXiv 2005.14165, table 2.1; the vocabulary is padded.
        "gpt3-175b": _gpt(96, 12288, 96, 51200),
        # arXiv 2104.04473, table 1.
        "gpt-1t": _gpt(128, 25600, 160, 51200),
        # arXiv 2401.04088, table 1, and config.json of mistralai/Mixtral-8x22B-v0.1; vocabularies padded.
        "mixtral-8x7b": f"{_gpt(32, 4096, 32, 32000)} --ffn-hidden-size 14336 --group-query-attention "
        f"--num-query-groups 8 --num-experts 8 --moe-router-topk 2 {_MIXTURE}",
        "mixtral-8x22b": f"{_gpt(56, 6144, 48, 32768)} --ffn-hidden-size 16384 --group-query-attention "
        f"--num-query-groups 8 --num-experts 8 --moe-router-topk 2 {_MIXTURE}",
        # arXiv 2505.09388, table 2, and config.json of Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B.
        "qwen3-30b-a3b": f"{_gpt(48, 2048, 32, 151936)} --ffn-hidden-size 6144 --moe-ffn-hidden-size 768 {_QWEN}",
        "qwen3-235b-a22b": f"{_gpt(94, 4096, 64, 151936)} --ffn-hidden-size 12288 --moe-ffn-hidden-size 1536 {_QWEN}",
        # arXiv 2412.19437, section 4.2, and config.json of deepseek-ai/DeepSeek-V3.
        "deepseek-v3": f"{_gpt(61, 7168, 128, 129280)} --ffn-hidden-size 18432 --multi-latent-attention "
        "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
        "--mtp-num-layers 1 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
        f"--moe-shared-expert-intermediate-size 2048 --moe-layer-freq [0]*3+[1]*58 {_MIXTURE}",
        # config.json of Qwen/Qwen3-Next-80B-A3B-Instruct; its attention has a gate, which is not counted.
        "qwen3-next-80b": f"--hybrid-layer-pattern {'GEGEGE*E' * 12} --hidden-size 2048 --num-attention-heads 16 "
        "--kv-channels 256 --group-query-attention --num-query-groups 2 --vocab-size 151936 --ffn-hidden-size 5120 "
        "--linear-num-key-heads 16 --linear-num-value-heads 32 --linear-key-head-dim 128 --linear-value-head-dim 128 "
        "--num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 "
        + _MIXTURE,
        # config.json of openai/gpt-oss-120b: every second layer has a window.
        "gpt-oss-120b": f"{_gpt(36, 2880, 64, 201088)} --ffn-hidden-size 2880 --kv-channels 64 --group-query-attention "
        "--num-query-groups 8 --window-size 128,0 --window-attn-skip-freq 2 --softmax-type learnable "
        f"--num-experts 128 --moe-router-topk 4 {_MIXTURE}",
    }
)


def gpt_of(parameters: float) -> str:
    """A GPT with about `parameters` beside embeddings: 128 times as wide as deep, as GPT-3 175B, heads of 128."""
    layers = max(8, 8 * round((parameters / (12 * 128**2)) ** (1 / 3) / 8))
    return _gpt(layers, 128 * layers, layers, 51200)


def preset(name: str) -> ModelShape:
    """The model of one of PRESETS."""
    return model_of(read_model(PRESETS[name].split()))


def training_flags(sequence_length: int) -> list[str]:
    """The flags to train a preset with: rotary positions, 16 bit, no dropout; each item is a flag with its values."""
    return [
        "--untie-embeddings-and-output-weights",
        "--position-embedding-type rope",
        f"--max-position-embeddings {sequence_length}",
        "--hidden-dropout 0",
        "--attention-dropout 0",
        "--bf16",
    ]


def add_model_flags(parser: argparse.ArgumentParser, **defaults: int | None) -> None:
    """The sizes of a GPT."""
    group = parser.add_argument_group("model, as in Megatron")
    group.add_argument("--num-layers", type=count_up_to(MOST_LAYERS), default=defaults["num_layers"])
    group.add_argument("--hidden-size", type=count, default=defaults["hidden_size"])
    group.add_argument("--num-attention-heads", type=count, default=defaults["num_attention_heads"])
    group.add_argument("--ffn-hidden-size", type=count, help="default: 4 times the hidden size, 8/3 with --swiglu")
    group.add_argument("--kv-channels", type=count, help="size of a head; default: hidden size / heads")
    group.add_argument("--num-query-groups", type=count, help="number of KV heads; default: as many as heads")
    group.add_argument("--swiglu", action="store_true", help="a gated feed-forward block of three matrices")
    group.add_argument("--vocab-size", type=count, default=defaults["vocab_size"], help="padded")


def add_every_model_flag(parser: argparse.ArgumentParser) -> None:
    """All flags of Megatron that change what a model costs."""
    add_model_flags(parser, num_layers=None, hidden_size=None, num_attention_heads=None, vocab_size=51200)
    for name in ("num-experts", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size", "mtp-num-layers"):
        parser.add_argument(f"--{name}", type=count)
    # Sizes with Megatron's defaults: experts, latent attention, gated delta nets, Mamba-2.
    for name, default in {
        **{"moe-router-topk": 2, "q-lora-rank": None, "kv-lora-rank": 32, "qk-head-dim": 128},
        **{"qk-pos-emb-head-dim": 64, "v-head-dim": 128, "linear-num-key-heads": 16, "linear-num-value-heads": 32},
        **{"linear-key-head-dim": 128, "linear-value-head-dim": 128, "linear-conv-kernel-dim": 4},
        **{"mamba-num-heads": None, "mamba-head-dim": 64, "mamba-num-groups": 8, "mamba-state-dim": 128},
    }.items():
        parser.add_argument(f"--{name}", type=count, default=default)
    parser.add_argument("--moe-layer-freq", type=_layer_frequency, default=1)
    parser.add_argument("--window-attn-skip-freq", type=_layer_frequency)
    parser.add_argument("--window-size", type=_window)
    parser.add_argument("--hybrid-layer-pattern")
    for name in ("group-query-attention", "multi-latent-attention", "qk-layernorm"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")


def _layer_frequency(text: str) -> int | list[int]:
    """A period in layers, or a list of 0 and 1 in the form of Megatron's parser: [0,1,1] or [0]*1+[1]*2."""
    if text.isdigit() and int(text):
        return int(text)
    found: list[int] = []
    for part in text.strip().removeprefix("(").removesuffix(")").split("+"):
        entries, _, times = part.strip().partition("*")
        try:
            numbers = [int(number) for number in entries.strip().removeprefix("[").removesuffix("]").split(",")]
            found += numbers * min(int(times or 1), MOST_LAYERS + 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a list such as [0]*1+[1]*47") from None
    if len(found) > MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than {MOST_LAYERS} layers")
    return found


def _window(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.strip("()").split(","))


def read_model(words: Sequence[str]) -> argparse.Namespace:
    """Read the flags of a model in a launch; others are passed over."""
    return read_known(words, add_every_model_flag)[0]


def model_of(launch: argparse.Namespace) -> ModelShape:
    """The model of a launch. Raises ValueError if a size is missing, or sizes do not go together."""
    return model_shape(settings_of(launch))


def settings_of(launch: argparse.Namespace) -> dict[str, Any]:
    """The settings of a launch with Megatron's defaults in place. Raises ValueError as `model_of`."""
    sizes = vars(launch)
    sizes = sizes | {"num_layers": len("".join(hybrid_stages(sizes))) or sizes["num_layers"]}
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if sizes[name] is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing: give the sizes of the model, or --model")
    hidden, heads, groups = launch.hidden_size, launch.num_attention_heads, launch.num_query_groups
    if launch.kv_channels is None and hidden % heads:
        raise ValueError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}; change one, or give "
            "--kv-channels"
        )
    if groups is not None and heads % groups:
        raise ValueError(f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}; change one")
    experts, active, frequency = (sizes.get(name) for name in ("num_experts", "moe_router_topk", "moe_layer_freq"))
    if experts is not None and active > experts:
        raise ValueError(f"--moe-router-topk {active} is more than --num-experts {experts}")
    if experts is not None and isinstance(frequency, list) and len(frequency) != sizes["num_layers"]:
        raise ValueError(f"--moe-layer-freq has {len(frequency)} entries, --num-layers is {sizes['num_layers']}")
    usual = int(4 * hidden * 2 / 3) // 64 * 64 if launch.swiglu else 4 * hidden
    return sizes | {
        "ffn_hidden_size": launch.ffn_hidden_size or usual,
        "kv_channels": launch.kv_channels or hidden // heads,
        "padded_vocab_size": launch.vocab_size,
        # plan-split takes --num-query-groups alone.
        "group_query_attention": sizes.get("group_query_attention", groups is not None),
    }
