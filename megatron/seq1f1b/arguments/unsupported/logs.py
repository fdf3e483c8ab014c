"""What a run saves or logs of its steps.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .row import OurFeature, given, rows

LOGS = (
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
