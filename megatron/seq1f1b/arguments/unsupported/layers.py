"""Kinds of layers, and multi-token prediction.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .conditions import (
    above,
    all_of,
    has_faulty_triton,
    has_layers,
    has_mamba_kernels,
    has_old_linear_attention,
    is_on_gpu_here,
    is_on_hopper_here,
    on,
    ties_embeddings,
    without,
)
from .row import OurFeature, given, rows

LAYERS = (
    *rows(
        OurFeature.EVERY_RUN,
        {"--squared-relu with fused activations": all_of(on("squared_relu"), on("bias_gelu_fusion"))},
        because="has no fused kernel in Megatron",
        way_out="add --no-bias-gelu-fusion",
    ),
    *rows(
        OurFeature.SEGMENTS,
        given("--experimental-attention-variant", "--heterogeneous-layers-config-path"),
        because="is not cut into segments yet",
        way_out="drop --sequence-splits to keep sequences whole",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--enable-mhc-connections"),
        because="is not tested with our schedules",
        way_out="drop --pipeline-schedule and --sequence-splits to run Megatron's own",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {"--hybrid-layer-pattern with D (sparse attention)": all_of(on("hybrid_layer_pattern"), has_layers("D"))},
        because="chooses among the keys of whole sequences",
        way_out="use * for attention",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--hybrid-layer-pattern with G on this Hopper GPU and "
            "flash-linear-attention before 0.5 and Triton 3.4.0 to 3.7.0": all_of(
                on("hybrid_layer_pattern"),
                has_layers("G"),
                is_on_hopper_here,
                has_old_linear_attention,
                has_faulty_triton,
            )
        },
        because="has wrong gradients",
        way_out="install flash-linear-attention 0.5.2 or later, with Triton 3.7.1 or later or with tilelang",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--hybrid-layer-pattern with M on this GPU without mamba-ssm, causal-conv1d": all_of(
                on("hybrid_layer_pattern"), has_layers("M"), is_on_gpu_here, without(has_mamba_kernels)
            )
        },
        because="needs their kernels",
        way_out="install mamba-ssm and causal-conv1d",
    ),
    *rows(
        OurFeature.EVERY_RUN,
        {
            "--mtp-num-layers with tied embeddings and --pipeline-model-parallel-size above 1 and --save": all_of(
                on("mtp_num_layers"), ties_embeddings, above("pipeline_model_parallel_size", 1), on("save")
            ),
            "--mtp-num-layers with tied embeddings and --pipeline-model-parallel-size above 1 and --load": all_of(
                on("mtp_num_layers"), ties_embeddings, above("pipeline_model_parallel_size", 1), on("load")
            ),
        },
        because="has two weights of one name in Megatron's checkpoints",
        way_out="add --untie-embeddings-and-output-weights",
    ),
    *rows(
        OurFeature.SEGMENTS,
        given("--mtp-use-repeated-layer"),
        because="runs one layer several times on the same segment, so that its keys would overwrite one another",
        way_out="drop it",
    ),
    *rows(
        OurFeature.SEGMENTS,
        given("--mtp-hsm"),
        because="shifts hidden states by a token, of which a segment has only its own",
        way_out="drop --sequence-splits to keep sequences whole",
    ),
    *rows(
        OurFeature.PAIRS,
        {"--mtp-num-layers above 1": above("mtp_num_layers", 1)},
        because="is beyond Megatron's schedule plans",
        way_out="give 1",
    ),
    *rows(
        OurFeature.UNITS,
        given("--mtp-num-layers"),
        because="weighs predictions by their micro-batch, which units change",
        way_out="take --sequence-splits instead of --unit-tokens",
    ),
)
