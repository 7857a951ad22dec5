"""Configurations for `accelerate launch`: what they say, what accelerate makes of them, and that they start it."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from transformers import AutoModelForCausalLM

import txl_hf  # noqa: F401 -- registers Transformer-XL with the Auto classes
from txl_hf.commands.recipe import RecipeParser

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
DECLARED = {
    "evaluate_lm.py": "commands/evaluate_lm.py",
    "prepare_corpus.py": "commands/prepare_corpus.py",
    "train_lm.py": "commands/recipe.py",
}
FIELDS = {
    "cpu": {"distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": True, "mixed_precision": "no"},
    "one_gpu": {"distributed_type": "NO", "num_processes": 1, "gpu_ids": "0", "mixed_precision": "bf16"},
    "eight_gpus": {"distributed_type": "MULTI_GPU", "num_processes": 8, "gpu_ids": "all", "mixed_precision": "bf16"},
    "two_nodes": {
        "distributed_type": "MULTI_GPU",
        "num_machines": 2,
        "num_processes": 16,
        "main_process_ip": None,
        "main_process_port": 29500,
        "rdzv_backend": "static",
        "mixed_precision": "bf16",
    },
    "fsdp2": {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16"},
    "zero2": {"distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "bf16"},
}


def test_every_configuration_is_tested():
    assert sorted(FIELDS) == sorted(path.stem for path in LAUNCH.glob("*.yaml"))


@pytest.mark.parametrize("name", FIELDS)
def test_a_configuration_says_what_its_name_promises(name):
    config = load_config_from_file(str(LAUNCH / f"{name}.yaml"))
    expected = {"num_machines": 1, "use_cpu": False} | FIELDS[name]
    assert {field: getattr(config, field) for field in expected} == expected


@pytest.mark.parametrize("name", FIELDS)
def test_the_command_in_its_comment_names_it(name):
    assert f"accelerate launch --config_file examples/launch/{name}.yaml " in (LAUNCH / f"{name}.yaml").read_text()


def parse(name: str, *options: str):
    """The arguments of `accelerate launch` with a configuration and options."""
    command = ["--config_file", str(LAUNCH / f"{name}.yaml"), *options, "script.py", "--steps", "3"]
    return _validate_launch_command(launch_command_parser().parse_args(command))[0]


def test_one_gpu_is_one_process():
    args = parse("one_gpu")
    assert not (args.multi_gpu or args.use_fsdp or args.use_deepspeed)
    command, environment = prepare_simple_launcher_cmd_env(args)
    assert command == [sys.executable, "script.py", "--steps", "3"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "0" and environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize(("name", "processes"), [("eight_gpus", "8"), ("fsdp2", "8"), ("cpu", "2")])
def test_as_many_processes_on_one_machine(name, processes):
    args = parse(name, "--main_process_port", "0")
    prepare_multi_gpu_env(args)
    assert args.nproc_per_node == processes
    args = parse(name, "--main_process_port", "0", "--num_processes", "4")
    prepare_multi_gpu_env(args)
    assert args.nproc_per_node == "4"


@pytest.mark.parametrize("rank", [0, 1])
def test_two_nodes_differ_by_their_rank(rank):
    args = parse(
        "two_nodes", "--main_process_ip", "first", "--machine_rank", str(rank), "--main_process_port", "29999"
    )
    prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank) == ("8", "2", rank)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("static", "first:29999")


def test_fsdp2_wraps_the_layers():
    environment = prepare_multi_gpu_env(parse("fsdp2", "--main_process_port", "0"))
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "TransfoXLLayer",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }
    assert {name: environment[name] for name in expected} == expected


def test_zero2_is_stage_2():
    args = parse("zero2", "--main_process_port", "0")
    args.deepspeed_fields_from_accelerate_config = ""
    _, environment = prepare_deepspeed_cmd_env(args)
    expected = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_GRADIENT_CLIPPING": "0.25",
    }
    assert {name: environment[name] for name in expected} == expected
    assert args.nproc_per_node == "8"


# --- on this machine -------------------------------------------------------------------------------------------------


def start(name: str, script: Path, *options: str, arguments: list[str] | None = None) -> subprocess.Popen:
    """`accelerate launch` with a configuration and further options, and a script with its arguments, on the CPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / f"{name}.yaml")]
    return subprocess.Popen(
        [*command, *options, str(script), *(arguments or [])],
        env=os.environ | {"ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*started: subprocess.Popen) -> str:
    """All that was printed, when every one has ended well."""
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), printed
    return "".join(printed)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


SUM_OF_RANKS = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
assert accelerator.device.type == "cpu" and torch.distributed.get_backend() == "gloo"
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1]))
assert total.item() == 3, total
print(f"process {accelerator.process_index} of {accelerator.num_processes}\\n", end="", flush=True)
accelerator.end_training()
"""


def test_cpu_starts_two_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SUM_OF_RANKS)
    printed = finish(start("cpu", script, "--main_process_port", "0"))
    assert "process 0 of 2" in printed and "process 1 of 2" in printed


@pytest.mark.slow
def test_two_nodes_find_each_other(tmp_path):
    """Two launchers of one process each, as two machines."""
    script = tmp_path / "script.py"
    script.write_text(SUM_OF_RANKS)
    where = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_ip", "127.0.0.1"]
    where += ["--main_process_port", free_port()]
    printed = finish(*(start("two_nodes", script, *where, "--machine_rank", rank) for rank in ("0", "1")))
    assert "process 0 of 2" in printed and "process 1 of 2" in printed


SHARDED = """
import os
import sys

import torch
from accelerate.state import DistributedType, PartialState
from torch.distributed.fsdp import FSDPModule
from transformers import TrainingArguments

from txl_hf import TokenStream, TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTrainer

sizes = {"d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "n_layer": 2, "mem_len": 6}
model = TransfoXLForCausalLM(TransfoXLConfig(vocab_size=61, cutoffs=[9, 30], div_val=2, **sizes))
arguments = TrainingArguments(
    sys.argv[1], max_steps=3, per_device_train_batch_size=2, use_cpu=True, save_strategy="no", report_to=[]
)
# accelerate shards on every device but the CPU, though torch can.
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
stream = TokenStream(torch.arange(200) % 61, 5, 4)
trainer = TransfoXLTrainer(model, arguments, train_dataset=stream)
trainer.train()
assert isinstance(trainer.model, FSDPModule)
assert all(isinstance(layer, FSDPModule) for layer in trainer.model.transformer.layers)
trainer.save_model(sys.argv[1])
# One process writes; gloo aborts it if the other leaves meanwhile.
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
# Without a line of ours too, one sharded run in twenty is aborted at its interpreter's end by threads of torch.
os._exit(0)
"""


@pytest.mark.slow
def test_fsdp2_trains_and_saves_a_whole_model(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SHARDED)
    options = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0"]
    finish(start("fsdp2", script, *options, arguments=[str(tmp_path / "saved")]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert model.config.n_layer == 2 and all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.slow
def test_an_example_in_two_processes(tmp_path):
    """The plain loop of accelerate, with memory."""
    script = ROOT / "examples" / "by_feature" / "music_events.py"
    weights = tmp_path / "music.pt"
    arguments = ["--smoke", "--steps", "5", "--output", str(weights)]
    printed = finish(start("cpu", script, "--main_process_port", "0", arguments=arguments))
    assert printed.count("Held-out bits per event") == 1, "one of the two reports"
    assert weights.is_file() and list(tmp_path.iterdir()) == [weights]


LAUNCHED = pytest.mark.parametrize(("name", "processes"), [("cpu", "2"), ("one_gpu", "1"), ("eight_gpus", "2")])


def launch_smoke(name: str, processes: str, script: str, folder: Path, *arguments: str) -> str:
    """The output of a script with `--smoke`, started by a configuration on the CPU."""
    options = ["--num_processes", processes, "--main_process_port", "0", "--mixed_precision", "no"]
    arguments = (*arguments, "--smoke", "--output", str(folder))
    return finish(start(name, ROOT / "examples" / script, *options, arguments=list(arguments)))


@LAUNCHED
@pytest.mark.slow
def test_a_loop_of_ones_own(tmp_path, name, processes):
    """The losses of one process, and a score of the whole text."""
    found = []
    for folder, options in ((tmp_path / "one", ("cpu", "1")), (tmp_path / name, (name, processes))):
        printed = launch_smoke(*options, "by_feature/accelerate_loop.py", folder)
        losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", printed)]
        score = json.loads((folder / "score.json").read_text())
        found.append([*losses, score["nll"], score["tokens"]])
    assert found[1] == pytest.approx(found[0], abs=1e-5) and len(found[0]) == 14


@LAUNCHED
@pytest.mark.slow
def test_a_recipe(tmp_path, name, processes):
    """The losses of one process, and its score."""
    recipe, found = str(ROOT / "examples" / "recipes" / "characters_small.yaml"), []
    for folder, options in ((tmp_path / "one", ("cpu", "1")), (tmp_path / name, (name, processes))):
        quiet = ["--dropout", "0", "--dropatt", "0", "--logging_steps", "1", "--use_cpu", "true"]
        launch_smoke(*options, "train_lm.py", folder, recipe, *quiet)
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        score = json.loads((folder / "results.json").read_text())["test"]["nll"]
        found.append([*(line["loss"] for line in lines if "loss" in line), score])
    assert found[1] == pytest.approx(found[0], abs=1e-5) and len(found[0]) > 2


def test_the_commands_of_the_page_name_what_there_is():
    """Scripts, recipes and configurations that exist, and options that they have."""
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    commands = [line for line in "\n".join(blocks).splitlines() if line and not line.startswith("#")]
    assert len(commands) >= 15
    of_recipes = {name[2:] for action in RecipeParser()._actions for name in action.option_strings}
    for command in commands:
        scripts = [word for word in command.split() if word.endswith(".py")]
        assert len(scripts) == 1, command
        for path in re.findall(r"examples/\S+", command):
            assert (ROOT / path).is_file(), path
        # Some scripts start a command of the package, which has the options.
        script = ROOT / scripts[0]
        package = ROOT / "src" / "txl_hf"
        declared = DECLARED.get(script.name)
        source = (package / declared if declared else script).read_text(encoding="utf-8")
        source += (package / "command_line.py").read_text(encoding="utf-8")
        for option in re.findall(r"--([\w-]+)", command.split(scripts[0])[1]):
            assert (
                option in of_recipes
                or f'"--{option}"' in source
                or re.search(rf"^    {option}: ", source, re.MULTILINE)
            ), option
        if "--config_file" in command:
            options = command.split("accelerate launch ")[1].split(scripts[0])[0].split()
            launch_command_parser().parse_args([*options, scripts[0]])
    for name in FIELDS:
        assert f"--config_file examples/launch/{name}.yaml " in page
    for path in re.findall(r"\]\((\S+?)\)", page):
        assert (ROOT / "examples" / path.split("#")[0]).exists(), path
