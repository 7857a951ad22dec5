"""How commands and scripts begin: Auto classes know the model, help is there, what is missing is one line."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from scripts import run_script

COMMANDS = {
    "txl-train": "import sys; from txl_hf.commands import train; train(sys.argv[1:])",
    "txl-evaluate": "import sys; from txl_hf.commands import evaluate; evaluate(sys.argv[1:])",
    "txl-prepare": "import sys; from txl_hf.commands import prepare; prepare(sys.argv[1:])",
    "txl-export": "import sys; from txl_hf.commands import export; export(sys.argv[1:])",
    "txl-generate": "import sys; from txl_hf.commands import generate; generate(sys.argv[1:])",
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
    "import txl_hf, transformers",
    "import txl_hf.transfo_xl.modeling_transfo_xl",
]


@pytest.mark.parametrize("order", [ORDERS[0], *(pytest.param(order, marks=pytest.mark.slow) for order in ORDERS[1:])])
def test_the_auto_classes_know_the_model_whatever_comes_first(order):
    process = run_script("-c", order + KNOWN, only_torch=True)
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("argument", ["--help", "--nothing-of-the-kind"])
def test_a_command_reads_its_options(command, argument):
    process = run_script("-c", COMMANDS[command], argument)
    if argument == "--help":
        assert process.returncode == 0 and process.stdout.startswith("usage: ") and not process.stderr
    else:
        assert process.returncode == 2 and "error: " in process.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("txl-train", ["nothing.yaml"]),
        ("txl-train", [str(RECIPE), "--data", "nothing", "--output", "o"]),
        ("txl-train", [str(RECIPE), "--data", ".", "--output", "."]),
        ("txl-train", [str(RECIPE), "--data", ".", "--output", "o", "--model_name_or_path", "./nothing"]),
        ("txl-evaluate", ["--model", "m", "--data", "nothing"]),
        ("txl-evaluate", ["--model", "./nothing", "--data", "."]),
        ("txl-export", ["--model", "a/b/nothing", "--output", "o"]),
        ("txl-serve", ["../nothing"]),
        ("txl-generate", ["./nothing"]),
        ("txl-generate", ["m", "--prompt_file", "nothing"]),
        ("txl-prepare", ["--corpus", "text", "--input", ".", "--tokenizer", "/nothing", "--output", "o"]),
        ("txl-prepare", ["--corpus", "text", "--input", "nothing", "--output", "o"]),
        ("txl-convert", ["--from", "nvidia", "--checkpoint", "nothing", "--output", "o"]),
    ],
)
def test_a_file_that_is_not_there_is_refused_in_one_line(command, arguments, tmp_path):
    (tmp_path / "a.txt").touch()
    process = run_script("-c", COMMANDS[command], *arguments, cwd=tmp_path)
    assert process.returncode == 1
    [said] = process.stderr.splitlines()
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
        ("by_feature/saved_memory.py", ["--model", "m", "--memory", "f", "--text", "t"], "--text t does not exist"),
        (
            "by_feature/through_memory.py",
            ["--output", "o", "--distance", "20"],
            "--distance 20 is no two hops: it must",
        ),
        ("by_feature/long_memory.py", ["--output", "o"], "give --train, --test and --output, or --draw"),
        ("by_feature/memory_agent.py", ["--env", "recall"], "--output is missing"),
    ],
)
def test_a_script_looks_at_its_command_line_before_any_work(script, arguments, said, tmp_path):
    (tmp_path / "a.txt").touch()
    process = run_script(EXAMPLES / script, *arguments, cwd=tmp_path)
    assert process.returncode == 1
    [line] = process.stderr.splitlines()
    assert line.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("script", "lacks", "install"),
    [
        ("by_feature/classification.py", "datasets", '"txl-hf[train]"'),
        ("by_feature/lora.py", "peft", "peft"),
        ("by_feature/music_events.py", "accelerate", '"txl-hf[train]"'),
        ("music/generate.py", "miditok", '"txl-hf[music]"'),
        ("generate_onnx.py", "onnxruntime", "onnxruntime tokenizers"),
        ("recurrent_ppo.py", "sb3_contrib", "sb3-contrib"),
        ("torchrl_ppo.py", "tensordict", "torchrl"),
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


def test_help_of_the_converters_names_the_command_that_is_installed():
    assert run_script("-c", COMMANDS["txl-convert"], "--help").stdout.startswith("usage: txl-convert ")


@pytest.mark.parametrize("command", ["txl-train", "txl-evaluate", "txl-prepare"])
def test_help_needs_no_extra_or_says_which(command):
    """With nothing of an extra at hand: help, or one line."""
    extras = ["datasets", "accelerate", "matplotlib", "pyarrow"]
    missing = f"import sys; sys.modules |= dict.fromkeys({extras})\n"
    process = run_script("-c", missing + COMMANDS[command], "--help", only_torch=True)
    if process.returncode:
        missing = "(accelerate|datasets) is not installed"
        assert re.fullmatch(rf'error: {missing}: pip install "txl-hf\[train\]"\n', process.stderr), process.stderr
    else:
        assert "usage: " in process.stdout


def test_an_import_watches_no_optimiser():
    """The hooks are of all optimisers of the process; a cache that keeps what weights project is what needs one."""
    code = "import txl_hf.training.trainer; from torch.optim import optimizer"
    code += "; print([*optimizer._global_optimizer_post_hooks])"
    assert run_script("-c", code).stdout == "[]\n"
