"""What a run saves or logs of its steps.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .conditions import above, all_of, is_any
from .row import OurFeature, given, rows

LOGS = (
    # In a library the schedule refuses it in its first step (runtime/step.py), with CUDA_LAUNCH_BLOCKING.
    *rows(
        OurFeature.ANY_SCHEDULE,
        {
            "--timing-log-level 2 with --pipeline-model-parallel-size above 1 on a GPU": all_of(
                above("timing_log_level", 1),
                above("pipeline_model_parallel_size", 1),
                is_any("distributed_backend", "nccl"),
            )
        },
        because="makes the host wait for a GPU that waits for messages, so the first step would not end",
        way_out="drop it, and take --pipeline-trace for the times of actions",
    ),
    *rows(
        OurFeature.SEGMENTS,
        given("--logits-save-dir", "--save-tokens-per-expert-interval", "--moe-routing-trace-path"),
        because="would log every segment as a micro-batch",
        way_out="drop it, or --sequence-splits",
    ),
    *rows(
        OurFeature.SEGMENTS,
        given("--save-activations-interval", "--save-dgrads-interval"),
        because="would save only the last segment",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        given("--save-wgrads-interval"),
        because="reads gradients when none are whole",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        given(
            "--save-params-interval",
            "--moe-routing-trace-dump-weights",
            "--log-params-norm",
            "--check-weight-hash-across-dp-replicas-interval",
        ),
        because="reads weights when none are gathered",
        way_out="drop it",
    ),
)
