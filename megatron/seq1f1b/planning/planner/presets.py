"""Models by name."""

from collections.abc import Mapping
from types import MappingProxyType

from ...errors import ParameterError
from ..costs import Experts, ModelShape


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 32768) -> ModelShape:
    """The sizes of the papers: a feed-forward block of four times the hidden size, heads that share it."""
    return ModelShape(layers, hidden, 4 * hidden, heads, hidden // heads, vocabulary)


def gpt_of(parameters: float) -> ModelShape:
    """A GPT of about so many parameters, without embeddings: 128 times as wide as deep, as GPT-3 175B, heads of 128."""
    layers = max(8, 8 * round((parameters / (12 * 128**2)) ** (1 / 3) / 8))
    return gpt(layers, 128 * layers, layers, 51200)


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    return ModelShape(layers, hidden, ffn, heads, hidden // heads, 128256, num_kv_heads=8, is_gated=True)


def _mixture(
    layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, experts: Experts, head_dim: int = 128
) -> ModelShape:
    """Experts in every layer, SwiGLU, grouped queries."""
    return ModelShape(
        layers,
        hidden,
        experts.ffn_hidden_size,
        heads,
        head_dim,
        vocabulary,
        num_kv_heads=kv_heads,
        is_gated=True,
        experts=experts,
        expert_layers=tuple(range(layers)),
    )


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        # arXiv 2406.03488; scripts/models.sh has the same.
        "2.7b": gpt(32, 2560, 32),
        "7b": gpt(32, 4096, 32),
        "13b": gpt(40, 5120, 40),
        "30b": gpt(64, 6144, 64),
        # arXiv 2407.21783, table 3.
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        # arXiv 2005.14165, table 2.1; the vocabulary is padded.
        "gpt3-175b": gpt(96, 12288, 96, 51200),
        # arXiv 2104.04473, table 1.
        "gpt-1t": gpt(128, 25600, 160, 51200),
        # arXiv 2401.04088, table 1, and the configuration of mistralai/Mixtral-8x22B-v0.1; vocabularies padded.
        "mixtral-8x7b": _mixture(32, 4096, 32, 8, 32000, Experts(8, 2, 14336)),
        "mixtral-8x22b": _mixture(56, 6144, 48, 8, 32768, Experts(8, 2, 16384)),
        # arXiv 2505.09388, table 2, and the configurations of Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B.
        "qwen3-30b-a3b": _mixture(48, 2048, 32, 4, 151936, Experts(128, 8, 768)),
        "qwen3-235b-a22b": _mixture(94, 4096, 64, 4, 151936, Experts(128, 8, 1536)),
    }
)


def preset(name: str) -> ModelShape:
    """Raises ValueError for a name that is not among PRESETS."""
    if name not in PRESETS:
        raise ParameterError(
            "{model} is unknown; take {0}, or give {num_layers.name} and its kin", ", ".join(PRESETS), model=name
        )
    return PRESETS[name]
