#!/usr/bin/env python3
"""Write the tables of what is supported, and what is not, into docs/compatibility.md."""

import re
from pathlib import Path
from typing import NamedTuple

from megatron.seq1f1b.arguments.supported import UNSUPPORTED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
TABLES = re.compile(r"(<!-- features: .*? -->\n).*?(\n<!-- end of features -->)", re.DOTALL)
REFUSED = "tests/unit_tests/arguments/test_supported.py::test_an_unsupported_feature_is_one_sentence"


class Supported(NamedTuple):
    """A feature of Megatron that works as without our flags; `shown_by` is the test that shows it, for pytest."""

    feature: str
    shown_by: str
    remark: str = ""


def _equality(cases: str) -> str:
    return f"tests/functional_tests/test_equality.py -k {cases}"


SUPPORTED: tuple[Supported, ...] = (
    Supported(
        "`--tensor-model-parallel-size`, `--sequence-parallel`",
        "tests/functional_tests/test_seq1f1b_training.py::test_beside_other_parallelism",
        "segments are multiples of the size",
    ),
    Supported(
        "`--num-layers-per-virtual-pipeline-stage` and its kin",
        "tests/functional_tests/test_seq1f1b_training.py::test_chunks_reduce_and_gather_beside_compute",
    ),
    Supported(
        "`--pipeline-placement v`",
        "tests/functional_tests/test_checkpoints.py::test_losses_go_on",
        "checkpoints are those of looped chunks; the losses of a step travel to the last rank as it ends",
    ),
    Supported(
        "`--pipeline-model-parallel-layout`",
        "tests/functional_tests/test_model_families.py::test_losses_are_those_of_megatrons_own_1f1b",
        "embedding, loss and multi-token prediction on stages of their own, too",
    ),
    Supported(
        "`--microbatch-group-size-per-virtual-pipeline-stage`",
        "tests/unit_tests/schedule/test_families.py::test_every_family_is_valid_for_every_size",
        "not looked at: chunks take turns as early as they can, with the fewest activations",
    ),
    Supported(
        "`--use-distributed-optimizer`, `--overlap-grad-reduce`, `--overlap-param-gather`",
        "tests/functional_tests/test_seq1f1b_training.py::test_a_chunk_reduces_while_the_other_goes_backward",
        "aligned over pipeline ranks as Megatron aligns them; shown by --pipeline-trace",
    ),
    Supported(
        "`--calculate-per-token-loss`, any loss mask",
        _equality("per-token"),
        "the loss of a micro-batch, not a mean of segments",
    ),
    Supported(
        "`--recompute-granularity` `selective`, `full`",
        _equality("'selective or full or kept-attention'"),
        "`full` repeats attention unless `--recompute-keeps-attention` is given",
    ),
    Supported(
        "`--recompute-modules` `core_attn`, `layernorm`, `mlp`, `moe`, `moe_act`, `shared_experts`, `mla_up_proj`",
        _equality("'recompute-modules or selective'"),
    ),
    Supported(
        "`--group-query-attention`",
        "tests/unit_tests/model/test_kernels.py::test_segments_equal_dense_attention",
        "segments keep KV heads as they are; FlashAttention 2 expands their gradients for a moment",
    ),
    Supported(
        "`--context-parallel-size`, `--cp-comm-type` `a2a`, `all_gather`",
        _equality("cp2"),
        "ranks share the heads of a segment, whose prefix is not sent again, and its queries where there are fewer "
        "heads; segments are multiples of twice the size",
    ),
    Supported(
        "`--multi-latent-attention`",
        "tests/functional_tests/test_model_families.py::test_losses_are_those_of_megatrons_own_1f1b",
        "keys and values are kept as they come out of the up-projection; where segments are long, their latents",
    ),
    Supported(
        "`--hybrid-layer-pattern` with `*`, `+`, `-`, `E`, `G`, `M`, `|`, `/`",
        _equality("'hybrid or recurrent or delta-net or mamba'"),
        "recurrent layers pass their state from segment to segment; packed documents reset it",
    ),
    Supported(
        "`--num-experts`, `--expert-model-parallel-size`, `--expert-tensor-parallel-size`, shared experts",
        "tests/functional_tests/test_model_families.py::test_losses_are_those_of_megatrons_own_1f1b",
        "balance losses, z-loss and expert bias are those of the micro-batch, not of segments",
    ),
    Supported(
        "`--position-embedding-type` `rope`, `yarn`, `learned_absolute`, `none`",
        _equality("pp2-positions"),
        "with `--rotary-percent`, `--rotary-interleaved`, `--use-rope-scaling`, `--no-rope-freq` and their kin",
    ),
    Supported("`--qk-layernorm`, `--qk-l2-norm`, `--attention-output-gate`", _equality("pp2-positions")),
    Supported("`--untie-embeddings-and-output-weights`, tied embeddings", _equality("pp2/")),
    Supported(
        "`--window-size`, `--window-attn-skip-freq`",
        _equality("pp2-windows"),
        "of the prefix a segment reads a window; not with the kernels of flash-attn-4",
    ),
    Supported("`--softmax-type` `off-by-one`, `learnable`", _equality("pp2-windows")),
    Supported(
        "`--mtp-num-layers`",
        _equality("mtp"),
        "the last tokens of a segment predict from, and predict, those of the next, within documents of --sft and "
        "--dataloader-inter-document-masking",
    ),
    Supported(
        "`--reset-position-ids`, `--eod-mask-loss`",
        "tests/functional_tests/test_documents.py::test_losses_are_those_of_megatrons_own_mask",
    ),
    Supported(
        "`--reset-attention-mask`, `--sft`, `--dataloader-inter-document-masking`",
        "tests/functional_tests/test_documents.py::test_losses_are_those_of_megatrons_own_mask",
        "attention is computed document by document; `balanced` cuts each micro-batch by its own",
    ),
    Supported(
        "`--hidden-dropout`",
        "tests/functional_tests/test_training_features.py::test_the_seed_decides_what_is_dropped_out",
    ),
    Supported(
        "`--attention-dropout`",
        "tests/unit_tests/model/test_kernel_dropout.py::test_gradients_are_those_of_autograd_through_the_same_masks",
        "masks follow from the seed and the split; fused on GPUs in 16 bits, plain matrix products, slower, elsewhere",
    ),
    Supported(
        "`--attention-backend` `auto`, `flash`, `fused`, `unfused`, `local`",
        "tests/unit_tests/model/test_cuda_kernel.py::test_choice",
        "the first two mean PyTorch's flash attention, which needs no other package, `fused` Transformer Engine's, "
        "the last two plain matrix products",
    ),
    Supported(
        "`--flash-attention-version` 2, 3, 4",
        "tests/unit_tests/model/test_cuda_kernel.py::test_segments_equal_unfused_attention",
        "2 is PyTorch's own; without the flag 3 on Hopper GPUs where it is installed, else 2; with 4 each packed "
        "document is a call",
    ),
    Supported(
        "`--transformer-impl transformer_engine`",
        "tests/functional_tests/test_transformer_engine.py::test_its_layers_train_by_segments",
        "weight gradients apart too; on a CPU refused",
    ),
    Supported(
        "`--bf16`, `--fp16`, fp32",
        "tests/functional_tests/test_seq1f1b_training.py::test_bf16_falls_like_megatrons_own",
        "fp32 attention on GPUs is not fused, so slower",
    ),
    Supported(
        "`--fp8-format` with `--fp8-recipe` `mxfp8`, `blockwise`",
        "tests/unit_tests/model/test_fp8_blocks.py::test_whole_blocks_in_segments_give_the_same_gradients",
        "blocks of 32 and of 128 tokens share a scale, and segments are multiples of them; shown on a stand-in",
    ),
    Supported(
        "evaluation, checkpoints, `--log-*`, timers, `--step-batch-size-schedule`",
        "tests/functional_tests/test_checkpoints.py::test_losses_go_on",
    ),
)


def as_markdown() -> str:
    """What is supported and what is not, each row of the former with the test that shows it."""
    lines = ["| feature of Megatron | remark | shown by |", "|---|---|---|"]
    for row in SUPPORTED:
        lines.append(f"| {row.feature.replace('|', r'\|')} | {row.remark} | `{row.shown_by}` |")
    lines += ["", "## Unsupported", "", f"Shown by `{REFUSED}`.", ""]
    lines += ["| feature of Megatron | unsupported | because it | way out |", "|---|---|---|---|"]
    for use, rows in UNSUPPORTED.items():
        lines += [f"| `{row.feature}` | {use.value} | {row.because} | {row.way_out} |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLES.sub(lambda found: found[1] + as_markdown() + found[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
