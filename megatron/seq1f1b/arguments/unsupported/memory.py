"""Recomputed activations, and those that move to the host.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .conditions import all_of, is_any, on, repeats_no_layers, without
from .row import OurFeature, given, rows

MEMORY = (
    *rows(
        OurFeature.EVERY_RUN,
        {"--recompute-num-layers 0 with --recompute-method uniform": repeats_no_layers},
        because="never ends its first forward in Megatron",
        way_out="give 1 or more",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        {
            "--recompute-keeps-attention without --recompute-granularity full": all_of(
                on("recompute_keeps_attention"), without(is_any("recompute_granularity", "full"))
            )
        },
        because="is of no use, since no whole layer is repeated",
        way_out="add that, or drop it",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--recompute-granularity selective with --recompute-modules gdn_norm_out": all_of(
                is_any("recompute_granularity", "selective"), is_any("recompute_modules", "gdn_norm_out")
            )
        },
        because="is not cut into segments yet",
        way_out="use --recompute-granularity full, or drop it",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--recompute-granularity selective with --recompute-modules mlp and biases": all_of(
                is_any("recompute_granularity", "selective"),
                is_any("recompute_modules", "mlp"),
                on("add_bias_linear"),
            )
        },
        because="never ends its first backward in Megatron, since a bias that a recomputed part returns "
        "becomes its result",
        way_out="add --disable-bias-linear",
    ),
    *rows(
        OurFeature.PAIRS,
        {"--recompute-granularity full": is_any("recompute_granularity", "full")},
        because="repeats layers as a whole, where nothing can run beside their exchanges",
        way_out="give --recompute-granularity selective with --recompute-modules layernorm mlp moe",
    ),
    *rows(
        OurFeature.MEGATRONS_OWN,
        given("--recompute-keeps-attention", "--offload-activations", "--offload-layers-leaving"),
        because="is not for Megatron's own schedules",
        way_out="add --sequence-splits or --pipeline-schedule 1f1b",
    ),
    *rows(
        OurFeature.PAIRS,
        given("--offload-layers-leaving"),
        because="moves layers one by one, which Megatron's schedule plans keep until all have run",
        way_out="drop it, so that units move as a whole",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--fine-grained-activation-offloading"),
        because="follows the order of Megatron's own schedules",
        way_out="use --offload-activations",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--cpu-offloading-num-layers"),
        because="keeps one forward until its backward, and the next would take its place",
        way_out="use --offload-activations",
    ),
    *rows(
        OurFeature.OFFLOAD,
        {
            "--overlap-grad-reduce with fused gradient accumulation": all_of(
                on("overlap_grad_reduce"), on("gradient_accumulation_fusion")
            )
        },
        because="needs marks of parameters, which autograd does not give back where activations move",
        way_out="give --no-gradient-accumulation-fusion",
    ),
)
