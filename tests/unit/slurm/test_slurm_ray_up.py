"""ray_up.sh and train.sbatch with stand-ins for the commands of Slurm: which node gets which pool, ports and command,
and what becomes of signals and statuses. tests/slurm runs them under a real Slurm with a real Ray."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[3] / "slurm"

SRUN = r"""#!/usr/bin/env bash
# Writes down its options and the command's arguments; a node's Ray lives until it is killed.
printf '%s\0' "$@" >"$RECORD/step.$$"
env >"$RECORD/environment.$$"
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) node=${1#*=} ;; esac
    shift
done
case "$*" in
*run_when_ready*)
    while [ "$1" != run_when_ready ]; do shift; done
    for node in $4; do until [ -e "$RECORD/ray.$node" ]; do sleep 0.02; done; done
    touch "$2"
    shift 4
    exec "$@"
    ;;
*start_ray*)
    [ "$node" != "${BROKEN:-}" ] || { echo "no such image"; exit 3; }
    touch "$RECORD/ray.$node"
    [ "$node" != "${LOST:-}" ] || { until [ -e "$RECORD/training" ]; do sleep 0.02; done; echo "lost"; exit 3; }
    exec sleep 600
    ;;
*address_of_this_node*) if [ -n "${REAL_ADDRESS:-}" ]; then "$@"; else echo 10.0.0.7; fi ;;
*" import "* | *" pull "*) for file in "$@"; do [[ $file != *.s[iq]* ]] || touch "$file"; done; exit "${IMPORT:-0}" ;;
esac
"""
SCONTROL = r"""#!/usr/bin/env bash
# `show hostnames` of a list that is written as words; `show node`; `requeue` as REQUEUE says.
if [ "$1" = requeue ]; then echo "$2" >>"$RECORD/requeued"; exit "${REQUEUE:-0}"; fi
if [ "$2" = node ]; then echo "   NodeAddr=${ADDRESS:-$3} NodeHostName=$3 Version=22.05.8"; exit; fi
tr ' ' '\n' <<<"$3"
"""


class Allocation:
    """The environment of a job's batch step."""

    def __init__(self, folder: Path) -> None:
        self.record = folder / "record"
        commands = folder / "bin"
        for made in (self.record, commands):
            made.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.logs = folder / "logs of a job"
        self.said = folder / "stderr"
        self.environment = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "RECORD": str(self.record),
            "SAID": str(self.said),
            "MEGATRON_RL_LOGS": str(self.logs),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "a1 a2 a3",
        }

    def run(self, *command: str, script: str = "ray_up.sh", **variables: str) -> subprocess.CompletedProcess:
        environment = self.environment | variables
        with self.said.open("w") as said:
            words = ["bash", SLURM / script, *command]
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=said, text=True, timeout=60)
        done.stderr = self.said.read_text()
        return done

    def steps(self, word: str) -> list[list[str]]:
        """The options and arguments of the steps with a word among them."""
        found = [path.read_text().split("\0")[:-1] for path in self.record.glob("step.*")]
        return [step for step in found if word in step]


@pytest.fixture
def allocation(tmp_path) -> Allocation:
    return Allocation(tmp_path)


def placed(allocation: Allocation) -> list[tuple[str, str, str, str]]:
    """Of every node: its name, pool, first port, and whether it is Ray's head."""
    found = []
    for step in allocation.steps("start_ray"):
        node, pool, _, _, port, is_head, _ = step[step.index("start_ray") + 1 :]
        assert f"--nodelist={node}" in step
        found.append((node, pool, port, is_head))
    return sorted(found)


def test_all_nodes_are_of_one_kind_unless_told_otherwise(allocation):
    assert allocation.run("true").returncode == 0
    assert placed(allocation) == [("a1", "", "20210", "yes"), ("a2", "", "20220", "no"), ("a3", "", "20230", "no")]
    assert {path.name for path in allocation.logs.iterdir()} == {"7_ready_0", *(f"7_ray_a{i}.log" for i in (1, 2, 3))}


@pytest.mark.parametrize("train", [1, 2])
def test_the_first_nodes_train_and_the_others_roll_out(allocation, train):
    assert allocation.run("true", MEGATRON_RL_TRAIN_NODES=str(train)).returncode == 0
    pools = [pool for _, pool, _, _ in placed(allocation)]
    assert pools == ["train"] * train + ["rollout"] * (3 - train)
    assert (allocation.logs / "7_ray_rollout_a3.log").exists()


def test_the_first_component_of_a_heterogeneous_job_trains(allocation):
    done = allocation.run(
        "true",
        SLURM_HET_SIZE="2",
        SLURM_JOB_NODELIST_HET_GROUP_0="a1",
        SLURM_JOB_NODELIST_HET_GROUP_1="b1 b2",
        MEGATRON_RL_FIRST_PORT="700",
    )
    assert done.returncode == 0, done.stderr
    assert placed(allocation) == [
        ("a1", "train", "700", "yes"),
        ("b1", "rollout", "710", "no"),
        ("b2", "rollout", "720", "no"),
    ]
    for step in allocation.steps("start_ray"):
        assert f"--het-group={0 if '--nodelist=a1' in step else 1}" in step


def test_twenty_eight_nodes(allocation):
    names = [f"gpu-{i:03}" for i in range(28)]
    assert allocation.run("true", SLURM_JOB_NODELIST=" ".join(names), MEGATRON_RL_TRAIN_NODES="8").returncode == 0
    found = placed(allocation)
    assert [node for node, *_ in found] == names
    assert [pool for _, pool, *_ in found] == ["train"] * 8 + ["rollout"] * 20
    ports = {int(port) + i for *_, port, _ in found for i in range(10)}
    assert len(ports) == 280 and min(ports) > 1024 and max(ports) < 32768, "below the ports that Linux deals out"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MEGATRON_RL_TRAIN_NODES": "3"}, "is 3, but the job has 3 nodes"),
        ({"MEGATRON_RL_TRAIN_NODES": "0"}, "is '0'; give the number of nodes that train"),
        ({"MEGATRON_RL_TRAIN_NODES": "1+1"}, "is '1+1'"),
        ({"SLURM_JOB_ID": ""}, "run this inside of sbatch or salloc"),
        ({"MEGATRON_RL_LOGS": "/proc/none"}, "the folder /proc/none for logs cannot be made"),
    ],
)
def test_wrong_variables_are_named(allocation, variables, message):
    done = allocation.run("true", **variables)
    assert done.returncode == 64 and message in done.stderr


@pytest.mark.parametrize("status", [0, 1, 75, 138, 143])
def test_the_status_is_the_commands(allocation, status):
    assert allocation.run("bash", "-c", f"exit {status}").returncode == status


def test_arguments_arrive_unchanged(allocation):
    words = ["two words", "", "*", "$HOME", 'a "quote"', "it's", "a\\b"]
    done = allocation.run("printf", r"<%s>\n", *words)
    assert done.stdout == "".join(f"<{word}>\n" for word in words)


def test_the_token_is_in_the_environment_of_all_steps_and_nowhere_else(allocation):
    done = allocation.run("printenv", "RAY_AUTH_TOKEN")
    token = done.stdout.strip()
    assert len(token) == 64 and set(token) <= set("0123456789abcdef")
    assert not any(token in word for step in allocation.steps("bash") for word in step) and token not in done.stderr
    environments = [path.read_text() for path in allocation.record.glob("environment.*")]
    assert len(environments) == 5, "the address, three nodes and the command"
    assert all(f"RAY_AUTH_TOKEN={token}\n" in environment for environment in environments)
    assert allocation.run("printenv", "RAY_AUTH_TOKEN").stdout.strip() != token, "each start has a token of its own"


def test_a_node_without_ray_ends_the_start_and_its_log_is_shown(allocation):
    done = allocation.run("sleep", "600", BROKEN="a2")
    assert done.returncode == 69
    assert "Ray on a2 ended" in done.stderr and "no such image" in done.stderr


def test_the_run_goes_on_without_a_later_node_and_ends_without_the_first(allocation):
    told = "until grep -q 'Ray on a2 ended' \"$SAID\"; do sleep 0.02; done"
    done = allocation.run("bash", "-c", f"touch '{allocation.record}/training'; {told}", LOST="a2")
    assert done.returncode == 0, done.stderr
    allocation.record.joinpath("training").unlink()
    first = allocation.run("bash", "-c", f"touch '{allocation.record}/training'; sleep 600", LOST="a1")
    assert first.returncode == 69 and "cannot go on without a1" in first.stderr


@pytest.mark.parametrize(("interface", "address"), [("", "10.9.0.1"), ("bridge0", "172.17.0.1")])
def test_the_head_has_the_address_that_reaches_the_second_node(allocation, interface, address):
    """In a network of its own, whose first address belongs to a bridge for containers."""
    if os.geteuid() != 0:
        pytest.skip("a network of its own needs root")
    network = r"""
        ip link add bridge0 type bridge && ip addr add 172.17.0.1/16 dev bridge0 && ip link set bridge0 up
        ip link add fabric0 type bridge && ip addr add 10.9.0.1/24 dev fabric0 && ip link set fabric0 up
        [ "$(hostname -I)" = "172.17.0.1 10.9.0.1 " ] && exec "$@"
    """
    command = ["unshare", "--net", "bash", "-c", network, "bash", SLURM / "ray_up.sh", "printenv", "RAY_ADDRESS"]
    variables = {"REAL_ADDRESS": "yes", "ADDRESS": "10.9.0.2", "MEGATRON_RL_INTERFACE": interface}
    done = subprocess.run(
        command, env=allocation.environment | variables, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{address}:20210\n"


def test_compilers_write_to_the_node_unless_told_otherwise(allocation):
    done = allocation.run("env", VLLM_CACHE_ROOT="/nvme/vllm")
    caches = f"/tmp/megatron_rl_{os.getuid()}"
    told = {"VLLM_CACHE_ROOT=/nvme/vllm", f"TRITON_CACHE_DIR={caches}/triton"}
    assert told | {f"TORCHINDUCTOR_CACHE_DIR={caches}/inductor"} <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("image", "command", "suffix"),
    [
        ("nvcr.io#nvidia/pytorch:25.11-py3", "docker://nvcr.io#nvidia/pytorch:25.11-py3", "sqsh"),
        ("dockerd://mine:1", "dockerd://mine:1", "sqsh"),
        ("docker://mine:1", "docker://mine:1", "sif"),
    ],
)
def test_an_image_of_a_registry_is_imported_once(allocation, image, command, suffix):
    done = allocation.run("true", MEGATRON_RL_CONTAINER=image)
    assert done.returncode == 0, done.stderr
    file = str(allocation.logs / f"7.{suffix}")
    [imported] = [
        step for program in ("enroot", "apptainer") for step in allocation.steps(program) if file in step[-2:]
    ]
    program = ["apptainer", "pull", file] if suffix == "sif" else ["enroot", "import", "--output", file]
    assert imported[-len(program) - 1 :] == [*program, command] and "--nodelist=a1" in imported
    for step in [*allocation.steps("start_ray"), *allocation.steps("run_when_ready")]:
        assert file in step or f"--container-image={file}" in step
    assert not Path(file).exists()
    failed = allocation.run("true", MEGATRON_RL_CONTAINER=image, IMPORT="1")
    assert failed.returncode == 64 and f"the image {image} cannot be imported" in failed.stderr


@pytest.mark.parametrize("pyxis", [True, False])
def test_containers(allocation, pyxis):
    image = "/images/my rl.sqsh" if pyxis else "/images/my rl.sif"
    done = allocation.run("true", MEGATRON_RL_CONTAINER=image, MEGATRON_RL_MOUNTS="/a:/b,/c:/c")
    assert done.returncode == 0, done.stderr
    here = os.getcwd()
    mounts = f"/tmp:/tmp,{here}:{here},{allocation.logs}:{allocation.logs},/a:/b,/c:/c"
    for step in [*allocation.steps("start_ray"), *allocation.steps("run_when_ready")]:
        if pyxis:
            assert step[7:10] == [f"--container-image={image}", f"--container-mounts={mounts}", step[9]]
            assert step[9] == f"--container-workdir={here}"
        else:
            assert step[7:15] == ["apptainer", "exec", "--nv", "--bind", mounts, "--pwd", here, image]
    [address] = allocation.steps("address_of_this_node")
    assert not any("rl.s" in word for word in address), "the address is that of the node, not of an image"


DRIVER = r"""#!/usr/bin/env bash
# Stands for the driver: writes down its arguments, and answers signals as recipes do.
printf '%s\n' "$@" >"$RECORD/driver"
trap 'exit 138' USR1; trap 'exit 143' TERM
[ -z "${STATUS:-}" ] || exit "$STATUS"
touch "$RECORD/training"
[ -z "${DIES:-}" ] || { until grep -q "Ray on" "$SAID"; do sleep 0.02; done; exit 1; }
while :; do sleep 0.05; done
"""


@pytest.fixture
def job(allocation) -> Allocation:
    python = allocation.record.parent / "bin" / "python"
    python.write_text(DRIVER)
    python.chmod(0o755)
    return allocation


@pytest.mark.parametrize(
    ("number", "requeue", "status", "said"),
    [
        (signal.SIGUSR1, 0, 75, "back in the queue"),
        (signal.SIGUSR1, 1, 75, "the same sbatch command continues the run"),
        (signal.SIGTERM, 0, 143, "the same sbatch command continues"),
    ],
)
def test_a_signal_to_the_job_reaches_the_driver_and_its_answer_decides(job, number, requeue, status, said):
    run = subprocess.Popen(
        ["bash", SLURM / "train.sbatch", "a.yaml"],
        env=job.environment | {"REQUEUE": str(requeue)},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (job.record / "training").exists():
        assert run.poll() is None
    run.send_signal(number)
    assert said in run.communicate(timeout=60)[0]
    assert run.returncode == status
    assert (job.record / "requeued").exists() == (number == signal.SIGUSR1)


def test_the_driver_gets_the_recipe_and_its_arguments(job):
    done = job.run("a b.yaml", "run.name=x y", script="train.sbatch", STATUS="0")
    assert done.returncode == 0 and not done.stdout
    common = ["a b.yaml", "run.name=x y", "cluster.ray_address=auto", "--resume", "auto"]
    assert (job.record / "driver").read_text().splitlines() == ["-m", "megatron_rl", "grpo", *common]
    job.run("sft", "a b.yaml", "run.name=x y", script="train.sbatch", STATUS="0", MEGATRON_RL_TRAIN_NODES="1")
    assert (job.record / "driver").read_text().splitlines() == ["-m", "megatron_rl", "sft", *common]


def test_rollout_nodes_are_the_engines_pool(job):
    job.run("a.yaml", script="train.sbatch", STATUS="0", MEGATRON_RL_TRAIN_NODES="1")
    words = (job.record / "driver").read_text().splitlines()
    assert {"cluster.pools.trainer=train", "cluster.pools.engine=rollout"} <= set(words)
    job.run("ppo", "a.yaml", script="train.sbatch", STATUS="0", MEGATRON_RL_TRAIN_NODES="1")
    of_ppo = (job.record / "driver").read_text().splitlines()
    assert of_ppo[2] == "ppo" and set(of_ppo) - set(words) == {"ppo", "cluster.pools.critic=train"}


def test_each_task_of_an_array_has_its_own_seed_and_name(job):
    kept, dates = "data.system_prompt=be 100%accurate", "data.chat_template={date: '%%a %d', all: '%a%a'}"
    array = {"script": "train.sbatch", "STATUS": "0", "SLURM_ARRAY_TASK_ID": "12"}
    assert job.run("run.seed=%a", "run.name=x/%a", kept, dates, **array).returncode == 0
    given = set((job.record / "driver").read_text().splitlines())
    assert {"run.seed=12", "run.name=x/12", kept, "data.chat_template={date: '%a %d', all: '1212'}"} <= given
    refused = job.run("run.name=x%%a", **array)
    assert refused.returncode == 64 and "no argument contains %a" in refused.stderr


@pytest.mark.deep
def test_a_lost_node_is_worth_another_start_ten_times_if_the_nodes_have_ever_been_ready(job):
    record = job.logs / "7_lost_nodes"
    assert job.run("a.yaml", script="train.sbatch", BROKEN="a2").returncode == 69
    assert not (job.record / "requeued").exists(), "the nodes have never been ready: something else is wrong"
    assert job.run("a.yaml", script="train.sbatch", LOST="a2", DIES="1").returncode == 69
    (job.record / "ray.a2").unlink()
    assert job.run("a.yaml", script="train.sbatch", BROKEN="a2", SLURM_RESTART_COUNT="1").returncode == 69
    assert (job.record / "requeued").read_text() == "7\n7\n"
    assert [line.split()[1] for line in record.read_text().splitlines()] == ["a2", "a2", "a2"]
    record.write_text("a2\n" * 10)
    assert job.run("a.yaml", script="train.sbatch", BROKEN="a2", SLURM_RESTART_COUNT="9").returncode == 69
    assert (job.record / "requeued").read_text() == "7\n7\n"


def test_a_start_that_was_stopped_before_a_step_is_repeated_three_times_in_turn(job):
    def requeues(status: int) -> int:
        done = job.run("a.yaml", script="train.sbatch", STATUS=str(status))
        assert done.returncode == 75 and ("raise the time limit" in done.stderr) == (status == 75 and stopped == 4)
        return len((job.record / "requeued").read_text().splitlines())

    stopped = 0
    for status, number in ((75, 1), (75, 2), (138, 3), (75, 4), (75, 5), (75, 6), (75, 6)):
        stopped = stopped + 1 if status == 75 else 0
        assert requeues(status) == number


@pytest.mark.parametrize("status", [1, 64])
def test_other_statuses_pass_and_nothing_is_requeued(job, status):
    assert job.run("a.yaml", script="train.sbatch", STATUS=str(status)).returncode == status
    assert not (job.record / "requeued").exists()


def test_a_copy_of_the_script_finds_its_files_from_where_it_was_submitted(job, tmp_path):
    """Slurm runs a copy of the submitted file."""
    copy = tmp_path / "spool" / "slurm_script"
    copy.parent.mkdir()
    copy.write_text((SLURM / "train.sbatch").read_text())
    done = job.run("a.yaml", script=str(copy), STATUS="0", SLURM_SUBMIT_DIR=str(SLURM.parent))
    assert done.returncode == 0, done.stderr
    lost = job.run("a.yaml", script=str(copy), STATUS="0", SLURM_SUBMIT_DIR=str(tmp_path))
    assert lost.returncode == 64 and "submit from the folder that holds slurm/" in lost.stderr
