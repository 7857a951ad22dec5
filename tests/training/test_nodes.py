"""Two machines that train together, each a network namespace of its own, joined by a virtual cable."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("accelerate")

from train_lm_process import run
from txl_hf.commands.recipe import write_smoke_data

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPE = {
    "n_layer": 2,
    "d_model": 16,
    "n_head": 2,
    "d_head": 8,
    "d_inner": 24,
    "tgt_len": 8,
    "mem_len": 8,
    "eval_mem_len": 8,
    "batch_size": 4,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "save_steps": 20,
    "eval_steps": 100,
    "max_steps": 60,
    "dropout": 0.0,
    "dropatt": 0.0,
}
IS_SET_UP = (
    "ip netns add {0}",
    "ip netns add {1}",
    "ip link add {0} type veth peer name {1}",
    "ip link set {0} netns {0}",
    "ip link set {1} netns {1}",
    "ip -n {0} addr add 10.77.0.1/24 dev {0}",
    "ip -n {1} addr add 10.77.0.2/24 dev {1}",
    "ip -n {0} link set {0} up",
    "ip -n {1} link set {1} up",
    "ip -n {0} link set lo up",
    "ip -n {1} link set lo up",
)


@pytest.fixture
def machines():
    """The names of two network namespaces, and of the device in each."""
    names = [f"txl{os.getpid()}n{rank}" for rank in (0, 1)]
    try:
        for line in IS_SET_UP:
            try:
                subprocess.run(line.format(*names).split(), check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    write_smoke_data(tmp_path / "data")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return [str(tmp_path / "recipe.yaml"), "--data", str(tmp_path / "data"), "--use_cpu", "true"]


def start(machines: list[str], script: str, arguments: list[str], log: Path) -> list[subprocess.Popen]:
    """`accelerate launch` of one process on each machine, by rank; what they print is in `log`0 and `log`1."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--mixed_precision", "no"]
    launch += ["--config_file", str(EXAMPLES / "launch" / "two_nodes.yaml"), "--main_process_ip", "10.77.0.1"]
    started = []
    for rank, name in enumerate(machines):
        command = ["ip", "netns", "exec", name, *launch, "--machine_rank", str(rank), str(EXAMPLES / script)]
        started.append(
            subprocess.Popen(
                [*command, *arguments],
                env=os.environ | {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": name},
                stdout=open(f"{log}{rank}", "w"),
                stderr=subprocess.STDOUT,
            )
        )
    return started


def finish(started: list[subprocess.Popen], log: Path):
    codes = [process.wait(timeout=300) for process in started]
    assert codes == [0, 0], [Path(f"{log}{rank}").read_text()[-3000:] for rank in (0, 1)]


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_node_that_is_killed_ends_the_other_and_both_resume(machines, arguments, tmp_path):
    """With the losses of one process, before and after."""
    assert run([*arguments, "--output", str(tmp_path / "one")]) == [0]
    output, log = tmp_path / "two", tmp_path / "log"
    arguments += ["--output", str(output), "--ddp_timeout", "30"]
    started = start(machines, "train_lm.py", arguments, log)
    for _ in count():
        assert [process.poll() for process in started] == [None, None], Path(f"{log}0").read_text()[-3000:]
        if (output / "checkpoint-20").is_dir():
            break
        time.sleep(0.05)
    # The launcher and its process, which has a session of its own.
    for pid in subprocess.check_output(["ip", "netns", "pids", machines[1]], text=True).split():
        os.kill(int(pid), signal.SIGKILL)
    assert started[0].wait(timeout=120) not in (0, None)
    started[1].wait()
    said = Path(f"{log}0").read_text()
    assert "Connection closed by peer" in said or "Connection reset by peer" in said or "Timed out" in said, said[
        -3000:
    ]
    assert len(losses(output)) < RECIPE["max_steps"]
    finish(start(machines, "train_lm.py", [*arguments, "--resume"], log), log)
    np.testing.assert_allclose(losses(output), losses(tmp_path / "one"), rtol=1e-5)


def test_a_loop_of_ones_own_on_two_nodes(machines, tmp_path):
    arguments = ["--smoke", "--output", str(tmp_path / "two")]
    finish(start(machines, "by_feature/accelerate_loop.py", arguments, tmp_path / "log"), tmp_path / "log")
    alone = [sys.executable, str(EXAMPLES / "by_feature" / "accelerate_loop.py"), "--smoke", "--output"]
    subprocess.run([*alone, str(tmp_path / "one")], check=True, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    found, expected = (json.loads((tmp_path / name / "score.json").read_text()) for name in ("two", "one"))
    assert found["tokens"] == expected["tokens"] and found["nll"] == pytest.approx(expected["nll"], abs=1e-5)
