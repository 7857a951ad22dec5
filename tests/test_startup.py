"""Commands, and the package itself, start before torch has come, and whatever Auto class comes knows the model."""

import ast
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

import txl_hf
from scripts import run_script

SLOW = {"torch", "datasets", "accelerate", "pandas", "matplotlib", "transformers.modeling_utils"}
COMMANDS = {
    "txl-train": "import sys; from txl_hf.commands import train; train(sys.argv[1:])",
    "txl-evaluate": "import sys; from txl_hf.commands import evaluate; evaluate(sys.argv[1:])",
    "txl-prepare": "import sys; from txl_hf.commands import prepare; prepare(sys.argv[1:])",
    "txl-export": "import sys; from txl_hf.commands import export; export(sys.argv[1:])",
    "txl-serve": "import sys; from txl_hf.commands import serve; serve(sys.argv[1:])",
    "txl-convert": "import sys; from txl_hf.conversion.convert import main; sys.exit(main(sys.argv[1:]))",
}
KNOWN = """
from transformers.models.auto import modeling_auto, tokenization_auto, configuration_auto
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLForTokenClassification, TransfoXLModel
from txl_hf import TransfoXLForSequenceClassification, TransfoXLTokenizer

assert type(configuration_auto.AutoConfig.for_model("transfo-xl")) is TransfoXLConfig
assert modeling_auto.MODEL_MAPPING[TransfoXLConfig] is TransfoXLModel
assert modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[TransfoXLConfig] is TransfoXLForCausalLM
assert modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[TransfoXLConfig] is TransfoXLForSequenceClassification
assert modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[TransfoXLConfig] is TransfoXLForTokenClassification
assert tokenization_auto.TOKENIZER_MAPPING[TransfoXLConfig] is TransfoXLTokenizer
assert TransfoXLConfig._auto_class == "AutoConfig" and TransfoXLTokenizer._auto_class == "AutoTokenizer"
assert TransfoXLModel._auto_class == "AutoModel" and TransfoXLForCausalLM._auto_class == "AutoModelForCausalLM"
"""
EXAMPLES = Path(__file__).parents[1] / "examples"
RECIPE = EXAMPLES / "recipes" / "characters_small.yaml"
ORDERS = [
    "from transformers import AutoModelForCausalLM, AutoTokenizer; import txl_hf",
    # Its imports bring the Auto classes.
    "import txl_hf; from transformers import LlamaModel",
    "import txl_hf, transformers",
    "import txl_hf.transfo_xl.modeling_transfo_xl",
    "import txl_hf.transfo_xl.generation_transfo_xl",
    "from txl_hf import TransfoXLTokenizer",
]

# The converters of this checkout, whichever is installed.
PATH = f"import txl_hf; txl_hf.__path__.insert(0, {str(Path(__file__).parents[1])!r})\n"


def run(code: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    command = [sys.executable, *options, "-c", PATH + code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def imported(process: subprocess.CompletedProcess) -> set[str]:
    """By `-X importtime`, which writes a line for each module."""
    return {line.rpartition("|")[2].strip() for line in process.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("arguments", [["--help"], ["--nothing-of-the-kind"]], ids=["help", "wrong option"])
def test_a_command_reads_its_options_before_anything_slow_is_imported(command, arguments):
    process = run(COMMANDS[command], *arguments, options=("-X", "importtime"))
    assert process.returncode == (0 if arguments == ["--help"] else 2)
    assert "argparse" in imported(process) and imported(process) & SLOW == set()


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("txl-train", ["nothing.yaml"]),
        ("txl-train", [str(RECIPE), "--data", "nothing", "--output", "o"]),
        pytest.param("txl-train", [str(RECIPE), "--data", ".", "--output", "."], marks=pytest.mark.slow),
        ("txl-train", [str(RECIPE), "--data", ".", "--output", "o", "--model_name_or_path", "./nothing"]),
        ("txl-evaluate", ["--model", "m", "--data", "nothing"]),
        ("txl-evaluate", ["--model", "./nothing", "--data", "."]),
        ("txl-export", ["--model", "a/b/nothing", "--output", "o"]),
        ("txl-serve", ["../nothing"]),
        ("txl-prepare", ["--corpus", "text", "--input", ".", "--tokenizer", "/nothing", "--output", "o"]),
        ("txl-prepare", ["--corpus", "text", "--input", "nothing", "--output", "o"]),
        ("txl-convert", ["--from", "nvidia", "--checkpoint", "nothing", "--output", "o"]),
    ],
)
def test_a_file_that_is_not_there_is_refused_before_anything_slow_is_imported(command, arguments):
    process = run(COMMANDS[command], *arguments, options=("-X", "importtime"))
    assert process.returncode == 1 and imported(process) & SLOW == set()
    [said] = [line for line in process.stderr.splitlines() if not line.startswith("import time:")]
    assert re.match(r"(error|txl-convert): .*(nothing|--output \.)", said), said


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("demo.py", ["--text", "nothing.txt"], "--text nothing.txt cannot be read: No such file or directory"),
        ("demo.py", ["--output", "."], ". exists and is no output of this demo: choose another folder with --output"),
        ("by_feature/lora.py", ["--model", "./m", "--text", "t", "--output", "o"], "--model ./m does not exist: "),
        ("by_feature/lora.py", ["--model", "m", "--text", "t", "--output", "o"], "--text t does not exist"),
        ("by_feature/lora.py", ["--model", "m", "--text", ".", "--output", "o"], "--text . is a folder, not a file"),
        ("by_feature/classification.py", ["--output", "."], "--output . exists: choose another, or remove it"),
        ("by_feature/music_events.py", ["--events", "t"], "--events t does not exist"),
        ("by_feature/document_resets.py", ["--documents", __file__, "t"], "--documents t does not exist"),
        ("by_feature/genome_labels.py", ["--fasta", "t"], "--fasta t does not exist"),
        ("by_feature/streaming_generation.py", ["--model", "~/m"], "--model ~/m does not exist: "),
        ("by_feature/memory_agent.py", ["--env", "recall"], "--output is missing"),
    ],
)
def test_a_script_looks_at_its_command_line_before_it_imports_anything_slow(script, arguments, said, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    command = [sys.executable, "-X", "importtime", EXAMPLES / script, *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 1 and imported(process) & SLOW == set()
    [line] = [line for line in process.stderr.splitlines() if not line.startswith("import time:")]
    assert line.startswith(f"error: {said}")


def test_the_package_is_imported_before_anything_slow():
    assert imported(run("import txl_hf", options=("-X", "importtime"))) & {*SLOW, "transformers", "numpy"} == set()


def test_a_tokenizer_needs_no_torch(tmp_path):
    """Which are seconds, where what is left is one; but transformers 5.17 imports it for a tokenizer of its own."""
    theirs = {"torch"} if version("transformers").startswith("5.17.") else set()
    text, data = tmp_path / "text.txt", tmp_path / "data"
    text.write_text("All happy families are alike.\n" * 100)
    arguments = ["--corpus", "text", "--mode", "characters", "--input", text, "--output", data]
    process = run(COMMANDS["txl-prepare"], *arguments, options=("-X", "importtime"))
    assert process.returncode == 0, process.stderr[-2000:]
    assert "tokenizers" in imported(process)
    assert imported(process) & {"torch", "transformers.modeling_utils"} == theirs
    load = "import sys; from txl_hf import TransfoXLTokenizer; TransfoXLTokenizer.from_pretrained(sys.argv[1])"
    process = run(load, data, options=("-X", "importtime"))
    assert process.returncode == 0 and imported(process) & SLOW == theirs, process.stderr[-2000:]


def cpu_seconds(code: str, *arguments: str) -> float:
    before = os.times()
    assert run(code, *arguments).returncode == 0
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_takes_less_than_the_libraries():
    """Of processor time, which others on the machine change little."""
    assert cpu_seconds(COMMANDS["txl-train"], "--help") < cpu_seconds("import torch")


@pytest.mark.parametrize("order", [ORDERS[0], *(pytest.param(order, marks=pytest.mark.slow) for order in ORDERS[1:])])
def test_the_auto_classes_know_the_model_whatever_comes_first(order):
    process = run_script("-c", order + KNOWN, only_torch=True)
    assert process.returncode == 0, process.stderr[-2000:]


THREADS = """
import sys, threading
import transformers, txl_hf

failed = []

def ask(name):
    try:
        getattr(txl_hf if name.startswith("Transfo") else transformers, name)
    except BaseException as error:
        failed.append((name, repr(error)))

threads = [threading.Thread(target=ask, args=[name]) for name in sys.argv[1:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
"""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["AutoModelForCausalLM", "AutoTokenizer"], marks=pytest.mark.slow),
        pytest.param(["Trainer", "AutoTokenizer"], marks=pytest.mark.slow),
        pytest.param(["AutoTokenizer", "TransfoXLForCausalLM"], marks=pytest.mark.slow),
        ["AutoModelForCausalLM", "AutoTokenizer", "Trainer", "AutoConfig"],
    ],
    ids="-".join,
)
def test_threads_that_import_do_not_wait_for_each_other_for_ever(names):
    """As a server loads a model and its tokenizer: none waits, with what another needs, for what that one has."""
    process = run(THREADS + KNOWN, *names)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("order", ["import transformers.trainer, txl_hf", "import txl_hf.training.trainer"])
def test_trainer_asks_for_cards_whatever_comes_first(order):
    """Once, however much is imported then."""
    asked = "from transformers import Trainer; theirs = Trainer.create_model_card.__wrapped__"
    asked += "; assert not hasattr(theirs, '__wrapped__')"
    asked += "; assert 'create_model_card' not in vars(txl_hf.TransfoXLTrainer)"
    process = run_script("-c", f"{order}; import txl_hf.transfo_xl.modeling_transfo_xl; {asked}")
    assert process.returncode == 0, process.stderr[-2000:]


def test_type_checkers_are_told_the_same_names():
    tree = ast.parse(Path(txl_hf.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    told = {alias.name: node.module for node in block.body for alias in node.names}
    assert told == txl_hf._MODULES and sorted(told) == txl_hf.__all__
    assert set(txl_hf.__all__) <= set(dir(txl_hf))
    with pytest.raises(AttributeError, match="has no attribute 'TransfoXL'"):
        txl_hf.TransfoXL  # noqa: B018


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupted_start_is_one_line(command, tmp_path):
    """A module that takes its time stands in for torch, which does so on a cold disk."""
    for module in ("transformers", "numpy", "torch", "onnx", "fastapi"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    options = {
        "txl-train": ["recipe.yaml"],
        "txl-evaluate": ["--model", "m", "--data", "."],
        "txl-prepare": ["--corpus", "text", "--output", "o"],
        "txl-export": ["--model", "m", "--output", "o"],
        "txl-serve": ["m"],
        "txl-convert": ["--from", "nvidia", "--checkpoint", ".", "--output", "o"],
    }[command]
    source = str(Path(__file__).parents[1] / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), source])}
    process = subprocess.Popen(
        [sys.executable, "-c", PATH + COMMANDS[command], *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell has what it runs in the background ignore Ctrl-C, and these tests too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "importing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.strip() in ("stopped", "txl-convert: interrupted")


@pytest.mark.parametrize(
    ("script", "lacks", "install"),
    [
        ("by_feature/classification.py", "datasets", '"txl-hf[train]"'),
        ("by_feature/lora.py", "peft", "peft"),
        ("by_feature/music_events.py", "accelerate", '"txl-hf[train]"'),
        ("music/generate.py", "miditok", '"txl-hf[music]"'),
        ("generate_onnx.py", "onnxruntime", "onnxruntime tokenizers"),
        ("recurrent_ppo.py", "sb3_contrib", "sb3-contrib"),
        ("space/app.py", "gradio", "gradio"),
        ("txl_hf.lm_eval", "lm_eval", '"txl-hf[lm-eval]"'),
    ],
)
def test_a_script_says_in_one_line_what_it_lacks(script, lacks, install, monkeypatch):
    monkeypatch.setitem(sys.modules, lacks, None)
    # Those of by_feature help without it.
    monkeypatch.setattr(sys, "argv", [script, "--smoke" if script.startswith("by_feature") else "--help"])
    if script.endswith(".py"):
        monkeypatch.syspath_prepend(EXAMPLES / Path(script).parent)
    with pytest.raises(SystemExit) as end:
        if script.endswith(".py"):
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    assert end.value.code.startswith(f"error: {lacks}")
    assert end.value.code.endswith(f" is not installed: pip install {install}")


def test_without_lm_eval_its_command_says_so():
    code = "import sys, runpy; sys.modules['lm_eval'] = None; runpy.run_module('txl_hf.lm_eval', run_name='__main__')"
    process = run(code, "--help")
    [said] = process.stderr.splitlines()
    assert process.returncode == 1 and re.match(r"error: lm_eval\S* is not installed: pip install ", said)


def test_help_of_the_converters_names_the_command_that_is_installed():
    assert run(COMMANDS["txl-convert"], "--help").stdout.startswith("usage: txl-convert ")


@pytest.mark.parametrize("command", ["txl-train", "txl-evaluate", "txl-prepare"])
def test_help_needs_no_extra_or_says_which(command, tmp_path):
    """With nothing of an extra at hand: help, or one line."""
    for module in ("datasets", "accelerate", "yaml", "matplotlib", "pyarrow"):
        (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('no', name={module!r})")
    process = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + COMMANDS[command], "--help")
    if process.returncode:
        assert process.stderr == 'error: yaml is not installed: pip install "txl-hf[train]"\n'
    else:
        assert "usage: " in process.stdout


def test_an_import_watches_no_optimiser():
    """The hooks are of all optimisers of the process; a cache that keeps what weights project is what needs one."""
    code = "import txl_hf.training.trainer; from torch.optim import optimizer; print([*optimizer._global_optimizer_post_hooks])"
    assert run_script("-c", code).stdout == "[]\n"
