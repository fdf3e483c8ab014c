"""Tensor and context parallelism, and other ways to divide a model.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .conditions import above, all_of, heads_are_unequal, is_any, on, other_than
from .row import OurFeature, given, rows

PARALLELISM = (
    *rows(
        OurFeature.SEGMENTS,
        {
            "--context-parallel-size above 1 with --cp-comm-type other than a2a, all_gather": all_of(
                above("context_parallel_size", 1), other_than("cp_comm_type", "a2a", "all_gather")
            )
        },
        because="moves the keys and values of the whole prefix for every segment",
        way_out="use --cp-comm-type a2a, or all_gather where there are more ranks than attention heads",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--cp-comm-type a2a with unequal numbers of attention heads": all_of(
                is_any("cp_comm_type", "a2a"), heads_are_unequal
            )
        },
        because="cannot divide those of a tensor-parallel rank by --context-parallel-size",
        way_out="use --cp-comm-type all_gather",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--hybrid-context-parallel"),
        because="follows the order of Megatron's own schedules",
        way_out="drop --pipeline-schedule and --sequence-splits to run those",
    ),
    *rows(
        OurFeature.SPLIT_BACKWARDS,
        given("--tp-comm-overlap"),
        because="exchanges beside the products of weight gradients, which are computed later",
        way_out="drop it, or use a schedule without W such as 1f1b",
    ),
    *rows(
        OurFeature.SEGMENTS_OF_TOKENS,
        given("--tp-comm-overlap"),
        because="has buffers for segments of one length",
        way_out="drop it, or take --sequence-splits",
    ),
    *rows(
        OurFeature.UNITS,
        given("--tp-comm-overlap"),
        because="has buffers for segments of one length, which units do not have",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PAIRS,
        {
            "--sequence-parallel with --hidden-dropout": all_of(on("sequence_parallel"), on("hidden_dropout")),
            "--sequence-parallel with --attention-dropout": all_of(on("sequence_parallel"), on("attention_dropout")),
        },
        because="drops the same on every tensor-parallel rank in Megatron's schedule plans",
        way_out="give 0 for the dropout",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        {
            "--tensor-parallel-num-weight-shards above --tensor-model-parallel-size": above(
                "tensor_parallel_num_weight_shards", "tensor_model_parallel_size"
            ),
            "--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size": above(
                "expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"
            ),
            "--use-megatron-fsdp": on("use_megatron_fsdp"),
            "--use-torch-fsdp2": on("use_torch_fsdp2"),
        },
        because="is not tested with our schedules",
        way_out="drop --pipeline-schedule and --sequence-splits to run Megatron's own",
    ),
)
