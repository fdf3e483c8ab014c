"""The models that are compared: what they are made of, and how Megatron builds them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import batched
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.seq1f1b.platform.local_hybrid import local_hybrid_spec

SEQUENCE, VOCABULARY, HIDDEN, HEADS = 56, 64, 32, 4
# Letters in place of the symbols of layers, which do not suit ids of tests.
PLAIN = str.maketrans({"*": "A", "-": "F", "/": "-"})


def options(**values: Any) -> tuple[tuple[str, Any], ...]:
    """Keyword arguments that can be hashed; tuples become lists again."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True)
class Model:
    """What a model is made of; `config` goes to Megatron's TransformerConfig, `gpt` to its GPTModel.

    With a `pattern` of layers it is a HybridModel. `transformer_engine` makes it of Transformer Engine's layers, which
    add weight gradients to `main_grad` themselves where it is "fused", or leave that to autograd where it is "unfused".
    `keeps_latents`: multi-latent attention keeps latents, however short its segments are. `keeps_attention`: full
    recomputation leaves attention out. `freezes_embedding`: as in fine-tuning of layers alone. `offloads`: that share
    of what a rank holds waits in the memory of the host, layer by layer with `layers_leaving`. `pairs`: forwards run
    beside backwards.
    """

    dtype: torch.dtype = torch.float64
    layers: int = 4
    heads: int = HEADS
    kv_heads: int = HEADS
    positions: str = "rope"
    tied: bool = False
    recompute: str | None = None
    per_token_loss: bool = False
    config: tuple[tuple[str, Any], ...] = ()
    gpt: tuple[tuple[str, Any], ...] = ()
    pattern: str | None = None
    transformer_engine: str | None = None
    keeps_latents: bool = False
    keeps_attention: bool = False
    freezes_embedding: bool = False
    offloads: float = 0.0
    layers_leaving: int = 0
    pairs: bool = False

    @property
    def label(self) -> str:
        """How it differs from the plain model, as far as it has fields for that."""
        words = ["fp32" if self.dtype == torch.float32 else "", f"kv{self.kv_heads}" if self.kv_heads < HEADS else ""]
        words += [f"heads{self.heads}" if self.heads != HEADS else ""]
        words += [self.positions if self.positions != "rope" else "", "tied" if self.tied else ""]
        words += [(self.pattern or "").translate(PLAIN), self.transformer_engine or ""]
        words += ["latents"] * self.keeps_latents
        words += [self.recompute or "", "but-attention" if self.keeps_attention else ""]
        words += ["frozen-embedding"] * self.freezes_embedding
        words += ["per-token"] * self.per_token_loss
        words += [f"offloads-{self.offloads:g}"] * (self.offloads > 0)
        words += [f"by-layer-{self.layers_leaving}"] * (self.layers_leaving > 0)
        words += ["pairs"] * self.pairs
        return "-".join(filter(None, words))

    @property
    def has_recurrent_layers(self) -> bool:
        return not {"G", "M"}.isdisjoint(self.pattern or "")

    @property
    def confuses_documents(self) -> bool:
        """Whether Megatron's own layers on a CPU go on from one document to the next."""
        return self.has_recurrent_layers or "window_size" in dict(self.config)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """The losses of its experts."""
        config = dict(self.config)
        z_loss = ("z_loss",) if config.get("moe_z_loss_coeff") else ()
        return config.get("moe_router_load_balancing_type", ()) + z_loss

    def but(self, **values: Any) -> Model:
        """The model with other values; those that are none of its fields go to Megatron's TransformerConfig."""
        own = {name: values.pop(name) for name in list(values) if name in self.__dataclass_fields__}
        return replace(self, **own, config=options(**(dict(self.config) | values)))

    def transformer_config(self, **layout: Any) -> TransformerConfig:
        """Megatron's configuration of the model, cut over ranks by `layout`."""
        recompute = {"recompute_granularity": self.recompute} if self.recompute else {}
        if self.recompute == "full":
            recompute |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in self.config}
        # What Megatron reads from the configuration without declaring it there.
        undeclared = {name: given.pop(name) for name in list(given) if name.startswith("yarn_")}
        kind = MLATransformerConfig if "kv_lora_rank" in given else TransformerConfig
        defaults = {
            "num_layers": self.layers,
            "hidden_size": HIDDEN,
            "num_attention_heads": self.heads,
            "kv_channels": HIDDEN // HEADS,
            "num_query_groups": self.kv_heads,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            "deallocate_pipeline_outputs": True,
            "gradient_accumulation_fusion": self.transformer_engine == "fused",
            "masked_softmax_fusion": False,
            # Megatron's local layers have no product that is grouped.
            "moe_grouped_gemm": self.transformer_engine is not None and "num_moe_experts" in given,
            "calculate_per_token_loss": self.per_token_loss,
        }
        config = kind(**(defaults | recompute | given), **layout)
        vars(config).update(undeclared)
        return config

    def build(
        self, config: TransformerConfig, is_first: bool, is_last: bool, chunk: int | None, groups=None
    ) -> GPTModel | HybridModel:
        """One stage of the model; `groups` is Megatron's pg_collection."""
        given = {
            "pre_process": is_first,
            "post_process": is_last,
            "position_embedding_type": "none" if config.multi_latent_attention else self.positions,
            "share_embeddings_and_output_weights": self.tied,
            "vp_stage": chunk,
            "pg_collection": groups,
        }
        if self.pattern is not None:
            stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
            decoder, *heads = self.pattern.split("/")
            decoder = "|".join(map("".join, batched(decoder, self.layers // stages)))
            given["hybrid_layer_pattern"] = "/".join([decoder, *heads])
            model = HybridModel(config, local_hybrid_spec(config), VOCABULARY, SEQUENCE, **given)
        else:
            is_te = self.transformer_engine is not None
            layers = {"use_transformer_engine": is_te, "qk_l2_norm": config.qk_l2_norm}
            layers["normalization"] = config.normalization
            spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, vp_stage=chunk, **layers)
            if config.mtp_num_layers:
                last = gpt_layer_specs.get_gpt_decoder_layer_specs(config, **layers)[-1]
                given["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(config, last, is_te, vp_stage=chunk)
            model = GPTModel(config, spec, VOCABULARY, SEQUENCE, **given, **dict(self.gpt))
        model = model.to(self.dtype)
        if self.freezes_embedding and is_first:
            model.embedding.requires_grad_(False)
        # Angles in fp32 would round by the position in the sequence, and documents that run apart start anew.
        if self.positions == "rope" and hasattr(model, "rotary_pos_emb"):
            model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq.to(self.dtype)
        return model


def variants() -> list[Model]:
    """Each way in which models differ."""
    grouped, learned = Model(kv_heads=2), Model(kv_heads=1, positions="learned_absolute", tied=True)
    recomputed = (Model(recompute=granularity) for granularity in ("full", "selective"))
    return [grouped, learned, *recomputed, Model(per_token_loss=True), Model(dtype=torch.float32)]


def positions() -> list[Model]:
    """Ways to encode positions, and what else layers do to queries, keys and the output of attention."""
    yarn = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 0.5, "correction_range_round_to_int": True}
    two, scaled = Model(layers=2), options(rope_scaling=True, seq_len_interpolation_factor=2.0)
    return [
        two.but(rotary_interleaved=True, qk_layernorm=True, gpt=options(rotary_percent=0.5)),
        two.but(no_rope_freq=(0, 1), attention_output_gate=True, gpt=scaled),
        two.but(positions="yarn", qk_l2_norm=True, **{f"yarn_{name}": value for name, value in yarn.items()}),
    ]


def latent(rope: str = "yarn", query_rank: int | None = 12) -> Model:
    """Multi-latent attention; the heads of keys (12) are larger than those of values (8)."""
    yarn = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 0.7}
    sizes = {"q_lora_rank": query_rank, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
    given = sizes | (yarn if rope == "yarn" else {})
    return Model(layers=2).but(rope_type=rope, qk_layernorm=query_rank is not None, **given)


def mixture(**values: Any) -> Model:
    """A dense layer and one with experts, two of four for each token."""
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "add_bias_linear": False}
    balance = {"moe_router_load_balancing_type": (), "moe_aux_loss_coeff": ()}
    return Model(layers=2).but(**(experts | balance | values))


def balanced(*kinds: str, **values: Any) -> Model:
    """With balance losses heavy enough to be seen beside the model's own."""
    coefficients = tuple(0.3 / (1 + i) for i in range(len(kinds)))
    return mixture(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=coefficients, **values)


def hybrid(pattern: str) -> Model:
    """Layers by Megatron's symbols: * attention, - MLP, E experts, G gated delta net, M Mamba-2; behind each / those
    that predict one more token."""
    decoder, *heads = pattern.split("/")
    prediction = {"mtp_num_layers": len(heads), "mtp_loss_scaling_factor": 0.7} if heads else {}
    experts = dict(mixture().config) if "E" in pattern else {}
    heads_of = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "mamba_num_groups": 2}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 4, "mamba_state_dim": 6, "mamba_head_dim": 8}
    model = Model(layers=len(decoder), pattern=pattern).but(activation_func=torch.nn.functional.silu)
    return model.but(**experts, **heads_of, **sizes, **prediction)
