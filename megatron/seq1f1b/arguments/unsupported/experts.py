"""Mixtures of experts.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .conditions import (
    above,
    all_of,
    ends_without_experts,
    fuses_biases_of_experts,
    has_experts_of_local_layers,
    has_layers_of_experts,
    is_any,
    on,
    packs_documents,
    without,
)
from .row import OurFeature, given, rows

EXPERTS = (
    *rows(
        OurFeature.EVERY_RUN,
        {
            "--num-experts with biases and fused activations": all_of(on("add_bias_linear"), fuses_biases_of_experts),
            "--num-experts with biases and --transformer-impl local": all_of(
                on("add_bias_linear"), has_experts_of_local_layers
            ),
        },
        because="ends in an error in Megatron's first step, whose experts then take no biases",
        way_out="add --disable-bias-linear",
    ),
    *rows(
        OurFeature.EVERY_RUN,
        {
            "--moe-router-topk above --num-experts": all_of(
                has_layers_of_experts, above("moe_router_topk", "num_experts")
            )
        },
        because="asks for more experts of a token than there are",
        way_out="give at most as many",
    ),
    *rows(
        OurFeature.PAIRS,
        {
            "a run without --expert-model-parallel-size above 1": without(above("expert_model_parallel_size", 1)),
            "--hybrid-layer-pattern with E": on("hybrid_layer_pattern"),
        },
        because="has no exchange of experts that Megatron can run beside other layers",
        way_out="drop --overlap-moe-expert-parallel-comm",
    ),
    *rows(
        OurFeature.SEGMENTS,
        given("--moe-expert-capacity-factor", "--moe-expert-rank-capacity-factor"),
        because="makes the experts of a token depend on the tokens beside it, which a segment changes",
        way_out="drop it",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--moe-router-load-balancing-type sinkhorn, quantile_balancing": is_any(
                "moe_router_load_balancing_type", "sinkhorn", "quantile_balancing"
            )
        },
        because="makes the experts of a token depend on the tokens beside it, which a segment changes",
        way_out="use --moe-router-load-balancing-type aux_loss",
    ),
    *rows(
        OurFeature.UNITS,
        {
            "--moe-router-load-balancing-type global_aux_loss": is_any(
                "moe_router_load_balancing_type", "global_aux_loss"
            )
        },
        because="waits in each forward for one of every replica, but units give replicas unequal numbers of them",
        way_out="use --moe-router-load-balancing-type aux_loss",
    ),
    *rows(
        OurFeature.PAIRS,
        {
            "a run without --moe-token-dispatcher-type alltoall, flex": without(
                is_any("moe_token_dispatcher_type", "alltoall", "flex")
            )
        },
        because="exchanges the tokens of all experts in the midst of their compute",
        way_out="add --moe-token-dispatcher-type alltoall",
    ),
    *rows(
        OurFeature.SEGMENTS_OF_TOKENS,
        {
            "--moe-token-dispatcher-type allgather with --expert-model-parallel-size above 1": all_of(
                is_any("moe_token_dispatcher_type", "allgather"), above("expert_model_parallel_size", 1)
            )
        },
        because="needs equally many tokens on every rank, but segments differ in length",
        way_out="use --moe-token-dispatcher-type alltoall",
    ),
    *rows(
        OurFeature.UNITS,
        {
            "--moe-token-dispatcher-type allgather with --expert-model-parallel-size above 1": all_of(
                is_any("moe_token_dispatcher_type", "allgather"), above("expert_model_parallel_size", 1)
            )
        },
        because="needs equally many tokens on every rank, but units differ in length",
        way_out="use --moe-token-dispatcher-type alltoall",
    ),
    *rows(
        OurFeature.PAIRS,
        {"--moe-flex-dispatcher-backend ncclep": is_any("moe_flex_dispatcher_backend", "ncclep")},
        because="keeps the tokens of one exchange at a time",
        way_out="use --moe-flex-dispatcher-backend deepep or hybridep",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--moe-flex-dispatcher-backend hybridep with packed documents without "
            "--moe-hybridep-pad-uneven-dispatch-inputs": all_of(
                is_any("moe_flex_dispatcher_backend", "hybridep"),
                packs_documents,
                without(on("moe_hybridep_pad_uneven_dispatch_inputs")),
            )
        },
        because="needs equally many tokens on every rank, but each cuts its segments by its own documents",
        way_out="give that flag, or use deepep",
    ),
    *rows(
        OurFeature.PAIRS,
        {"--moe-layer-freq with a dense last layer": ends_without_experts},
        because="leaves out the norm behind the last layer in Megatron's schedule plans",
        way_out="drop --overlap-moe-expert-parallel-comm",
    ),
    *rows(
        OurFeature.SPLIT_BACKWARDS,
        {
            "--moe-grouped-gemm with biases and --transformer-impl transformer_engine": all_of(
                on("moe_grouped_gemm"), on("add_bias_linear"), is_any("transformer_impl", "transformer_engine")
            )
        },
        because="computes the gradients of biases sometimes with those of weights, sometimes with those of inputs",
        way_out="give --disable-bias-linear, or use a schedule without W such as 1f1b",
    ),
    *rows(
        OurFeature.SPLIT_BACKWARDS,
        given("--moe-shared-expert-overlap"),
        because="computes shared experts on a stream of their own, and nothing would wait for their weight gradients",
        way_out="drop it",
    ),
    *rows(
        OurFeature.SPLIT_BACKWARDS,
        given("--overlap-dispatch-backward-with-experts-wgrad"),
        because="computes weight gradients in the backward of inputs",
        way_out="drop it, or use a schedule without W such as 1f1b",
    ),
    *rows(
        OurFeature.PAIRS,
        given(
            "--moe-shared-expert-overlap",
            "--overlap-dispatch-backward-with-experts-wgrad",
            "--ep-overlap-early-attn-memory-release",
        ),
        because="has an order of its own for the parts of a layer",
        way_out="drop it",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--moe-paged-stash"),
        because="follows the order of Megatron's own schedules",
        way_out="drop --pipeline-schedule and --sequence-splits to run those",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        {
            "--moe-use-grouped-tensor": on("moe_use_grouped_tensor"),
            "--moe-dispatch-fwd-dtype mxfp8": is_any("moe_dispatch_fwd_dtype", "mxfp8"),
            "--moe-combine-bwd-dtype mxfp8": is_any("moe_combine_bwd_dtype", "mxfp8"),
        },
        because="is not tested with our schedules",
        way_out="drop --pipeline-schedule and --sequence-splits to run Megatron's own",
    ),
)
