"""Optimizers, partitioned state, checkpoints.

Tested in arguments/test_unsupported.py by test_an_unsupported_feature_is_one_sentence.
"""

from .conditions import above, is_any, on, other_than, without
from .row import OurFeature, given, rows

TRAINING_STATE = (
    *rows(
        OurFeature.MEGATRONS_OWN,
        given("--partition-state"),
        because="is not for Megatron's own schedules",
        way_out="add --pipeline-schedule breadth-first",
    ),
    *rows(
        OurFeature.PAIRS,
        given("--partition-state"),
        because="does not follow two units at once yet",
        way_out="drop one of the two",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        {"--optimizer other than adam, sgd": other_than("optimizer", "adam", "sgd")},
        because="keeps parameters in an order of its own",
        way_out="use --optimizer adam",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        {"a run without --use-distributed-optimizer": without(on("use_distributed_optimizer"))},
        because="keeps the state of the optimizer whole",
        way_out="add --use-distributed-optimizer",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        {"--num-distributed-optimizer-instances above 1": above("num_distributed_optimizer_instances", 1)},
        because="reduces gradients once more among the instances",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        given("--use-precision-aware-optimizer", "--optimizer-cpu-offload"),
        because="holds weights of its own that the shares do not follow yet",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        given("--overlap-param-gather-with-optimizer-step"),
        because="gathers before a chunk is at work",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        given("--use-nccl-ub"),
        because="registers buffers, which then cannot be freed",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        given("--optimizer-cuda-graph"),
        because="replays one step in memory that the next has freed",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        {
            "--ddp-param-name-patterns-for-fp32-local-accumulation": on(
                "ddp_param_name_patterns_for_fp32_local_accumulation"
            )
        },
        because="sums gradients in memory of its own, which is not divided into shares yet",
        way_out="drop it",
    ),
    *rows(
        OurFeature.PARTITIONED_STATE,
        {"--ckpt-format other than torch_dist": other_than("ckpt_format", "torch_dist")},
        because="saves weights on some ranks only, and these would wait for the others",
        way_out="use --ckpt-format torch_dist",
    ),
    *rows(
        OurFeature.V_CHUNKS,
        {"--ckpt-format torch": is_any("ckpt_format", "torch")},
        because="keeps chunks by the rank that holds them",
        way_out="use --ckpt-format torch_dist",
    ),
    *rows(
        OurFeature.ANY_SCHEDULE,
        given("--inprocess-restart"),
        because="trains again in a process whose pipeline has failed",
        way_out="drop it, and let torchrun or Slurm start the job again",
    ),
)
