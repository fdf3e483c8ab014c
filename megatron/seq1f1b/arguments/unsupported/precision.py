"""Numbers of few bits.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from collections.abc import Mapping
from types import MappingProxyType

from .conditions import above, all_of, has_recipe_of_kitchen, is_any, is_on_gpu, on, other_than, without
from .row import OurFeature, given, rows

# The number of tokens that share a scale, for each --fp8-recipe that scales in blocks.
BLOCKS: Mapping[str, int] = MappingProxyType({"mxfp8": 32, "blockwise": 128})

PRECISION = (
    *rows(
        OurFeature.EVERY_RUN,
        {
            "--fp32-residual-connection with --transformer-impl local and the CPU": all_of(
                on("fp32_residual_connection"), is_any("transformer_impl", "local"), without(is_on_gpu)
            )
        },
        because="gives layers inputs of another type than their weights, which no kernel there takes",
        way_out="drop it",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--fp8-format with --fp8-recipe other than mxfp8, blockwise": all_of(
                on("fp8"), other_than("fp8_recipe", "mxfp8", "blockwise")
            ),
            "--te-precision-config-file": on("te_precision_config_file"),
            "quant_recipe": on("quant_recipe"),
            "kitchen_config_file": on("kitchen_config_file"),
            "a recipe of kitchen": has_recipe_of_kitchen,
        },
        because="may scale by the largest value of whole tensors, but a segment has only a part",
        way_out="use --fp8-recipe mxfp8 or blockwise, whose scales are those of a few tokens",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--fp8-format with --context-parallel-size above 1": all_of(on("fp8"), above("context_parallel_size", 1)),
            "--fp8-format with --num-experts": all_of(on("fp8"), on("num_experts")),
        },
        because="scales tokens together that lie in different segments",
        way_out="drop --fp8-format",
    ),
    *rows(
        OurFeature.SEGMENTS,
        given("fp8_dot_product_attention", "fp8_multi_head_attention"),
        because="computes attention in 8 bits, which the kernels for segments cannot",
        way_out="drop it",
    ),
    *rows(
        OurFeature.SEGMENTS,
        given("--fp4-format"),
        because="scales by the largest value of a micro-batch, too",
        way_out="use --fp8-format",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        given("--fp8-param-gather", "--fp4-param-gather"),
        because="keeps weights in few bits, which are not divided into shares yet",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PAIRS,
        given("--fp8-format", "--fp4-format"),
        because="does not follow two units at once yet",
        way_out="drop one of the two",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--output-logit-dtype"),
        because="is not tested with our schedules",
        way_out="drop --pipeline-schedule and --sequence-splits to run Megatron's own",
    ),
)
