import pytest

from moe_framework.distributed.runtime import LaunchEnvironment, launch_environment
from moe_framework.distributed.slurm import SlurmStep, first_host, slurm_step, tasks_per_node
from moe_framework.errors import ConfigError

# As a task of `srun` sees them: rank 3 of five, the first of the second node.
STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07,09]",
    "SLURM_NODELIST": "gpu[01-09]",
}
NEEDED = ("SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NODEID")


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in STEP.items() if name not in names}


def test_a_task_finds_its_place_among_those_of_its_own_step():
    assert slurm_step(STEP) == SlurmStep(3, 0, 5, 2, "gpu07", 10042)


def test_the_jobs_variables_serve_where_the_steps_are_missing():
    environ = without("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    assert slurm_step(environ) == SlurmStep(3, 0, 8, 4, "gpu01", 10042)


@pytest.mark.parametrize("step", [None, "", "4294967290", "4294967291", "batch"])
def test_a_batch_script_or_an_interactive_shell_is_no_step(step: str | None):
    environ = without("SLURM_STEP_ID") | ({} if step is None else {"SLURM_STEP_ID": step})
    assert slurm_step(environ) is None
    assert launch_environment(environ) == LaunchEnvironment()


def test_a_step_of_one_task_is_one_rank_without_a_launcher():
    assert launch_environment(STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == LaunchEnvironment()


def test_the_ranks_of_a_step_meet_at_its_first_node():
    place = launch_environment(STEP)
    assert place == LaunchEnvironment(3, 0, 5, 2, launched=True, init_method="tcp://gpu07:10042")


def test_an_ipv6_address_is_put_in_brackets():
    place = launch_environment(STEP | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "29501"})
    assert place.init_method == "tcp://[fe80::1]:29501"


def test_torchruns_variables_win_over_slurms():
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert launch_environment(STEP | torchrun | meeting) == LaunchEnvironment(1, 1, 2, 2, launched=True)


def test_each_job_each_start_of_it_and_each_step_has_a_port_of_its_own():
    changes = ({}, {"SLURM_JOB_ID": "43"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_STEP_ID": "1"})
    steps = [slurm_step(STEP | change) for change in changes]
    assert len({step.master_port for step in steps if step}) == len(changes)


@pytest.mark.parametrize("job", ["1", "19999", "20000", "4294967295"])
def test_the_port_is_one_that_a_user_may_listen_on_and_no_client_gets(job: str):
    step = slurm_step(STEP | {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": "7"})
    assert step is not None
    assert 1024 <= step.master_port < 32768


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_variable_of_a_step_is_named(name: str):
    with pytest.raises(ConfigError, match=rf"{name} not set although SLURM_STEP_ID.*Start with srun"):
        slurm_step(without(name))


@pytest.mark.parametrize("name", [*NEEDED, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_shown(name: str):
    with pytest.raises(ConfigError, match=rf"{name}=first must be a number"):
        slurm_step(STEP | {name: "first"})


def test_a_node_beyond_the_counts_is_refused():
    with pytest.raises(ConfigError, match=r"SLURM_STEP_TASKS_PER_NODE=3,2 has no node SLURM_NODEID=2"):
        slurm_step(STEP | {"SLURM_NODEID": "2"})


@pytest.mark.parametrize(
    ("value", "counts"),
    [("4", [4]), ("2,1", [2, 1]), ("8(x3)", [8, 8, 8]), ("2(x3),1", [2, 2, 2, 1]), ("1,12(x2),3", [1, 12, 12, 3])],
)
def test_counts_of_tasks_are_expanded(value: str, counts: list[int]):
    assert tasks_per_node(value) == counts


@pytest.mark.parametrize("value", ["", "two", "2(3)", "2(x3", "2,,1", "-1"])
def test_malformed_counts_of_tasks_are_refused(value: str):
    with pytest.raises(ConfigError, match=r"must look like 2\(x3\),1"):
        tasks_per_node(value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("n[1-2]", "n1"),
        ("gpu[007-012,020]", "gpu007"),
        ("gpu[3,5-7],cpu1", "gpu3"),
        ("login,gpu[1-2]", "login"),
        ("a100-node[04-05]-ib", "a100-node04-ib"),
        ("rack[2-3]n[5,7]", "rack2n5"),
        ("cluster-a.b.c", "cluster-a.b.c"),
    ],
)
def test_the_first_node_of_a_list_is_found(nodes: str, first: str):
    assert first_host(nodes) == first
