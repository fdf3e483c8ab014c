"""Orders and placements of a pipeline's actions.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .conditions import all_of, is_any, on, predicts_before_the_loss, repeats_embeddings_on_a_rank
from .row import OurFeature, given, rows

SCHEDULES = (
    *rows(
        OurFeature.MEGATRONS_OWN,
        {"--pipeline-placement v": is_any("pipeline_placement", "v")},
        because="is not for Megatron's own schedules",
        way_out="add --pipeline-schedule auto",
    ),
    *rows(
        OurFeature.PAIRS,
        {
            "--pipeline-schedule gpipe, breadth-first": is_any("pipeline_schedule", "gpipe", "breadth-first"),
            "--pipeline-schedule auto": is_any("pipeline_schedule", "auto"),
        },
        because="has no forward beside a backward",
        way_out="use --pipeline-schedule 1f1b or zb-h1",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        {
            "--pipeline-schedule-file with --pipeline-schedule": all_of(
                on("pipeline_schedule_file"), on("pipeline_schedule")
            )
        },
        because="is a whole schedule",
        way_out="drop one of the two",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        {
            "--pipeline-schedule-file with --step-batch-size-schedule": all_of(
                on("pipeline_schedule_file"), on("step_batch_size_schedule")
            ),
        },
        because="is for one number of micro-batches",
        way_out="drop one of the two",
    ),
    *rows(
        OurFeature.SEGMENTS_OF_TOKENS,
        given("--pipeline-schedule-file"),
        because="is an order for one number of segments, and each micro-batch has its own",
        way_out="use --pipeline-schedule 1f1b",
    ),
    *rows(
        OurFeature.UNITS,
        {
            "--pipeline-schedule auto": is_any("pipeline_schedule", "auto"),
            "--pipeline-schedule-file": on("pipeline_schedule_file"),
        },
        because="is an order for one number of segments, and units give each step another",
        way_out="use --pipeline-schedule 1f1b",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--cuda-graph-impl"),
        because="follows the order of Megatron's own schedules",
        way_out="use --cuda-graph-impl none, without --enable-cuda-graph and --external-cuda-graph",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--delay-wgrad-compute"),
        because="follows the order of Megatron's own schedules, where it postpones weight gradients within a layer",
        way_out="use --pipeline-schedule zb-h1, which postpones them behind later actions, beside pairs, too",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--defer-embedding-wgrad-compute"),
        because="pairs activations and gradients in forward order, but segments go backward in reverse",
        way_out="drop it",
    ),
    *rows(
        OurFeature.MEGATRONS_OWN,
        {
            "--pipeline-trace with --overlap-moe-expert-parallel-comm": all_of(
                on("pipeline_trace"), on("overlap_moe_expert_parallel_comm")
            )
        },
        because="times forwards and backwards, which then run at once",
        way_out="drop one of the two",
    ),
    *rows(
        OurFeature.EVERY_RUN,
        {
            "--pipeline-model-parallel-layout with copies of the embedding in several chunks of a rank": all_of(
                on("pipeline_model_parallel_layout"), repeats_embeddings_on_a_rank
            )
        },
        because="leaves ranks that wait for one another in Megatron, or copies that differ",
        way_out="lay out multi-token prediction on the stage of the loss, or on a rank without embedding and "
        "tied output",
    ),
    *rows(
        OurFeature.V_CHUNKS,
        {
            "--pipeline-model-parallel-layout with multi-token prediction before the loss": all_of(
                on("pipeline_model_parallel_layout"), predicts_before_the_loss
            )
        },
        because="keeps a second embedding on a rank of its own",
        way_out="lay them out on one stage, or use --pipeline-placement looped",
    ),
)
