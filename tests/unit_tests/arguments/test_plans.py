"""Training does what was planned: the flags of a plan, read as training reads them."""

import shlex

from megatron.seq1f1b.arguments import pipeline_config, run_of_arguments
from megatron.seq1f1b.commands.launch_flags import decided_flags, read_launch
from megatron.seq1f1b.planning.run_costs import RunCosts
from unit_tests.arguments.parsed import parsed
from unit_tests.planning.planner.test_flags import sample, words_of


def test_training_cuts_sequences_where_the_plan_does():
    for candidate in sample():
        setup = candidate.setup
        if setup.pipeline_parallel == 1:
            continue
        ours = [
            flag for flag in decided_flags(candidate) if flag.startswith(("--pipeline-schedule", "--sequence-split"))
        ]
        chunks = setup.placement.num_chunks
        megatron = vars(read_launch(words_of(candidate))) | {
            "padded_vocab_size": 32768,
            "data_parallel_size": setup.data_parallel,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        }
        megatron = {
            name: value for name, value in megatron.items() if value is not None and "sequence_split" not in name
        }
        args = parsed("--device", "cuda", *shlex.split(" ".join(ours)), **megatron)
        config = pipeline_config(args, run := run_of_arguments(args), RunCosts(args, run))
        assert config.lengths == setup.segments
        assert config.run.layers_per_stage == setup.layers_per_stage
        assert config.schedule.name == setup.family
        assert config.run.num_microbatches == setup.num_microbatches
