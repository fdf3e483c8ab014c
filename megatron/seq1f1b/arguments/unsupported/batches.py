"""Sequences, the batches and documents they are in, and how a token weighs.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .conditions import above, all_of, finds_a_number_of_segments, on, packs_documents, without
from .row import OurFeature, given, rows, setting_of

BATCHES = (
    *rows(
        OurFeature.MEGATRONS_OWN,
        given("--sequence-split-strategy", "--sequence-split-profile"),
        because="cuts nothing, since no number of segments is given",
        way_out="add --sequence-splits, or drop it",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        {
            "--sequence-split-strategy without --sequence-splits": all_of(
                on("sequence_split_strategy"), without(finds_a_number_of_segments)
            )
        },
        because="cuts nothing",
        way_out="add that, or drop it",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        {
            "--sequence-split-file with --sequence-split-strategy": all_of(
                on("sequence_split_file"), on("sequence_split_strategy")
            )
        },
        because="has the lengths of all segments already",
        way_out="drop one of the two",
    ),
    *rows(
        OurFeature.SEGMENTS_OF_TOKENS,
        given(
            "--sequence-splits",
            "--sequence-split-file",
            "--sequence-split-strategy",
            "--sequence-split-profile",
            "--unit-tokens",
        ),
        because="cuts by another rule than --segment-tokens",
        way_out="drop one of the two",
    ),
    *rows(
        OurFeature.UNITS,
        given("--sequence-splits", "--sequence-split-file", "--sequence-split-strategy", "--sequence-split-profile"),
        because="is for sequences of one length, and --unit-tokens decides by itself where to cut",
        way_out="drop one of the two",
    ),
    *rows(
        OurFeature.UNITS,
        {"a run without packed documents": without(packs_documents)},
        because="has sequences of one length",
        way_out="add --sft, --reset-attention-mask or --dataloader-inter-document-masking, or take --sequence-splits",
    ),
    *rows(
        OurFeature.UNITS,
        {"a run without --calculate-per-token-loss": without(on("calculate_per_token_loss"))},
        because="weighs a token by its micro-batch, which units change",
        way_out="add --calculate-per-token-loss",
    ),
    *rows(
        OurFeature.UNITS,
        {
            "--micro-batch-size above 1": above("micro_batch_size", 1),
            "--eval-micro-batch-size above 1": above("eval_micro_batch_size", 1),
        },
        because="puts several sequences side by side, where units put them one after the other",
        way_out="give 1",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            f"--sequence-split-file with {size} above 1 and {packing}": all_of(
                on("sequence_split_file"), above(setting_of(size), 1), on(setting_of(packing))
            )
            for size in ("--micro-batch-size", "--eval-micro-batch-size")
            for packing in ("--sft", "--dataloader-inter-document-masking")
        },
        because="has the segments of one sequence, but there all sequences of a micro-batch are one pack, which is cut",
        way_out="give 1, or --sequence-splits in place of the file",
    ),
    *rows(
        OurFeature.SEGMENTS,
        {
            "--allow-ambiguous-pad-tokens with --reset-attention-mask": all_of(
                on("allow_ambiguous_pad_tokens"), on("reset_attention_mask")
            )
        },
        because="erases the tokens that end documents where padding is the same token",
        way_out="drop --allow-ambiguous-pad-tokens",
    ),
    *rows(
        OurFeature.EVERY_RUN,
        given("--rampup-batch-size"),
        because="is parsed by Megatron and then ignored, so that every step would have --global-batch-size",
        way_out="give --step-batch-size-schedule, such as '0:16 1B:32', or drop it",
    ),
    *rows(
        OurFeature.EVERY_RUN,
        {
            "--full-validation without --multiple-validation-sets": all_of(
                on("full_validation"), without(on("multiple_validation_sets"))
            )
        },
        because="ends in an error in Megatron's first evaluation",
        way_out="add --multiple-validation-sets",
    ),
    *rows(
        OurFeature.EVERY_RUN,
        {
            "--full-validation with --eval-micro-batch-size above 1 and --pipeline-model-parallel-size above 1": all_of(
                on("full_validation"), above("eval_micro_batch_size", 1), above("pipeline_model_parallel_size", 1)
            )
        },
        because="reads one sequence at a time in Megatron, whatever the size of a micro-batch between stages",
        way_out="use --eval-micro-batch-size 1",
    ),
)
