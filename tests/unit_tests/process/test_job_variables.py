"""Wrong variables of a job are one sentence that names the variable."""

import pytest

from megatron.seq1f1b.process import job_variables
from megatron.seq1f1b.process.job_variables import check_job_variables, check_meeting_place

OF_A_JOB = {
    "WORLD_SIZE": "8",
    "RANK": "5",
    "LOCAL_WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize("environ, argv", [({}, []), (OF_A_JOB, []), ({"WORLD_SIZE": "64"}, ["--dry-run"])])
def test_those_of_launchers_pass(environ, argv):
    check_job_variables(environ, argv)


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x in the environment is not a whole number from 0 on; what starts the ranks"),
        ({"RANK": ""}, "RANK= in the environment is not a whole number from 0 on"),
        ({"RANK": "-1"}, "RANK=-1 in the environment is not a whole number from 0 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment is not a whole number from 1 on"),
        ({"LOCAL_WORLD_SIZE": "1.5"}, "LOCAL_WORLD_SIZE=1.5 in the environment is not a whole number"),
        ({"MASTER_PORT": "tcp://10.0.0.1:80"}, "MASTER_PORT=tcp://10.0.0.1:80 in the environment is not a whole"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 in the environment is not a whole number from 1 to 65535"),
        ({"RANK": "8"}, "RANK=8 in the environment must be below WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 in the environment must be below LOCAL_WORLD_SIZE=4"),
    ],
    ids=str,
)
def test_a_wrong_one_is_named(wrong, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        check_job_variables(OF_A_JOB | wrong, [])


@pytest.mark.parametrize("rank", ["0", "3"])
@pytest.mark.parametrize("name", ["no.such.host.invalid", "x" * 100], ids=["unknown", "too long"])
def test_a_host_that_cannot_be_looked_up_is_named(monkeypatch, name, rank):
    """By every rank: none waits for the others until --distributed-timeout-minutes."""
    for patience in ("_PATIENCE", "_PATIENCE_OF_OTHERS", "_POLL"):
        monkeypatch.setattr(job_variables, patience, 0.1)
    wrong = OF_A_JOB | {"MASTER_ADDR": name, "RANK": rank, "LOCAL_RANK": rank}
    with pytest.raises(ValueError, match=rf"^MASTER_ADDR={name} in the environment cannot be looked up \("):
        check_job_variables(wrong, [])
    check_job_variables(wrong, ["--dry-run"])


def test_a_place_to_meet_that_is_not_set_is_named():
    """As for a script that is started without a launcher."""
    check_meeting_place(OF_A_JOB)
    with pytest.raises(ValueError, match="^MASTER_ADDR and MASTER_PORT are not set; start the script by torchrun"):
        check_meeting_place({})
    with pytest.raises(ValueError, match="^MASTER_PORT is not set; "):
        check_meeting_place({"MASTER_ADDR": "localhost"})


def test_a_size_without_a_rank_is_named():
    with pytest.raises(ValueError, match="^WORLD_SIZE=2 in the environment, but RANK is not set"):
        check_job_variables({"WORLD_SIZE": "2"}, [])
