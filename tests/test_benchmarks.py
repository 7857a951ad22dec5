"""The benchmarks at tiny sizes: what they write, that a wrong contender stops them, that the tables are current."""

import argparse
import contextlib
import csv
import importlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from transformers import AutoTokenizer

from scripts import run_script, start_script
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM
from txl_hf.commands.recipe import parse_arguments

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
CPU = ["--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_threads_of_contenders_wait_briefly():
    """Threads that did not spin at all were a third of a decoded token's time."""
    code = (
        "import argparse, os, harness; parser = argparse.ArgumentParser(); "
        "harness.add_arguments(parser, 'x.csv', 1.0); harness.complete(parser.parse_args(['--device', 'cpu'])); "
        "print(os.environ.get('OMP_WAIT_POLICY'), os.environ['GOMP_SPINCOUNT'])"
    )
    settings = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["None", "10000"]


def run(*command: str | Path) -> subprocess.CompletedProcess:
    return run_script(*command, PYTHONPATH=os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def forked(monkeypatch, tmp_path):
    """Contenders that are forked from a process with the libraries, and otherwise as they are."""
    import harness

    class Forked(harness.Contender):
        def __init__(self, command: list[str]):
            self.command, folder = command, Path(tempfile.mkdtemp(dir=tmp_path))
            pipes = [folder / "requests", folder / "answers"]
            for pipe in pipes:
                os.mkfifo(pipe)
            self.errors = (folder / "errors").open("w+")
            self.process = start_script(*command[1:], streams=[*pipes, folder / "errors"])
            self.process.stdin, self.process.stdout = pipes[0].open("w"), pipes[1].open()
            self.process.communicate = self.process.join

    monkeypatch.setattr(harness, "Contender", Forked)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert None not in row and None not in row.values(), "every row has every column"
        assert row["processor"] and row["torch"] and row["transformers"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
    return rows


@pytest.mark.slow
def test_model(tmp_path):
    output = tmp_path / "model.csv"
    options = ["--smoke", *CPU, "--output", output, "--workloads", "smoke-decode", "--contenders", "ours"]
    process = run(BENCHMARKS / "model.py", *options)
    assert process.returncode == 0, process.stderr
    assert "FLOPs of a token" in process.stdout and "measured in a matrix product" in process.stdout
    [row] = read(output)
    assert (row["workload"], row["contender"], row["repeats"]) == ("smoke-decode", "ours", "2")
    low, middle, high = (float(row[f"tokens_per_second_p{p}"]) for p in (20, 50, 80))
    assert 0 < low <= middle <= high
    assert 0 < float(row["mfu"]) < 1 and float(row["peak_mib"]) > 0
    assert float(row["nll_difference"]) < 1e-4
    assert 0 < float(row["token_ms_p50"]) <= float(row["token_ms_p99"])
    assert float(row["first_token_ms"]) > 0 and float(row["prefill_tokens_per_second"]) > 0


@pytest.mark.parametrize("task", ["train", "evaluate", "decode"])
def test_every_contender(task, tmp_path):
    """In this process: all take the steps of their task, and those that have our weights pass the gate."""
    import model

    workload = model.SMOKE[f"smoke-{task}"]
    model.save(workload, str(tmp_path))
    arguments = argparse.Namespace(device="cpu", dtype="fp32")
    names = dict.fromkeys([*model.CPU[task], *model.CUDA[task], "ours-bf16"])
    contenders = [name for name in names if "legacy" not in name]
    # Tried by hand: they compile.
    contenders = [name for name in contenders if "compile" not in name and "flex_attention" not in name]
    if find_spec("x_transformers") is None:
        contenders = [name for name in contenders if name not in model.X_TRANSFORMERS]
    others = {"gpt2", "floor", *model.X_TRANSFORMERS}
    # What evaluates with a cache scores 1,024 tokens at once, unless each segment's loss is wanted.
    apart = {"ours-step", "ours-mems", "ours-eager", *model.X_TRANSFORMERS}
    together = set(contenders) - apart if task == "evaluate" else set()
    checks, given = {}, set()
    for name in contenders:
        running = model.begin(name, workload, str(tmp_path), arguments)
        checks[name] = running.check(2)
        if task == "decode":
            given.add(running.text[0, -1].item())
        tokens, details = running.step()
        segments = 1024 // (workload.segment * workload.batch) if name in together else 1
        assert tokens == segments * workload.segment * workload.batch
        assert len(details.get("gaps", [])) == (tokens - 1 if task == "decode" else 0)
    assert len(given) == (task == "decode"), "all go on from one token, whatever they would have written"
    differences, wrong = model.gate(task, checks, "fp32")
    assert not wrong and set(differences) == set(contenders) - others
    assert differences["ours-bf16"] > 1e-4, "it rounds"
    if task != "decode":
        other = checks["floor"] | {"text": []}
        _, wrong = model.gate(task, checks | {"ours": other}, "fp32")
        assert wrong.keys() == {"ours"} and "other losses" in wrong["ours"]


def test_a_gate_of_an_evaluation_reads_until_a_graph_does():
    import model
    from txl_hf.kernels.captured import MOST_GRAPHS, SEGMENTS_BEFORE

    assert model.LAUNCHED == SEGMENTS_BEFORE + MOST_GRAPHS


@pytest.mark.parametrize("contender", ["ours", "floor"])
def test_the_softmax_of_a_sampled_workload_knows_how_frequent_words_are(contender, tmp_path):
    """Of the floor too: a softmax that does not would leave out clusters that the others compute."""
    import dataclasses

    import harness
    import model

    workload = dataclasses.replace(model.SMOKE["smoke-decode"], sampled=True)
    model.save(workload, str(tmp_path))
    loaded = model.load(contender, workload, str(tmp_path), argparse.Namespace(device="cpu", dtype="fp32"))
    frequencies = harness.token_frequencies(loaded.config.vocab_size).float()
    found = torch.cat([layer.bias for layer in loaded.lm_head.out_layers])
    torch.testing.assert_close(found.detach(), frequencies.log())


def test_a_trained_workload_goes_on_with_a_trained_model_and_its_text(tmp_path):
    import dataclasses

    import model
    from txl_hf.commands.prepare_corpus import main as prepare

    text, data, trained = tmp_path / "text.txt", tmp_path / "data", tmp_path / "trained"
    words = [f"word{i % 50}" for i in range(4000)]
    text.write_text("\n".join(" ".join(words[i : i + 20]) for i in range(0, 4000, 20)))
    prepare(["--corpus", "text", "--input", str(text), "--mode", "whitespace", "--output", str(data)])
    workload = dataclasses.replace(model.SMOKE["smoke-decode"], sampled=True, trained=True)
    small = TransfoXLForCausalLM(TransfoXLConfig(**workload.config | {"mem_len": 3, "eos_token_id": 0}))
    small.save_pretrained(trained)
    ids = model.save(workload, str(tmp_path / "saved"), (str(trained), str(data)))
    loaded = model.load("ours", workload, str(tmp_path / "saved"), argparse.Namespace(device="cpu", dtype="fp32"))
    for name, parameter in small.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert loaded.config.mem_len == workload.memory and loaded.generation_config.eos_token_id is None
    assert ids.shape == (1, workload.memory + 1)
    assert AutoTokenizer.from_pretrained(data).decode(ids[0]) in " ".join(words)
    untrained = dataclasses.replace(workload, trained=False)
    drawn = [model.save(untrained, str(tmp_path / "drawn"), given) for given in (None, (str(trained), str(data)))]
    assert torch.equal(*drawn), "another workload of the same run has weights and tokens of its own"
    with pytest.raises(ValueError, match="a trained workload goes on with a model: .* by --trained"):
        model.save(workload, str(tmp_path / "other"))
    running = model.begin("ours", workload, str(tmp_path / "saved"), argparse.Namespace(device="cpu", dtype="fp32"))
    running.check(2)
    assert running.step()[0] == workload.segment
    with pytest.raises(ValueError, match=r"has cutoffs=.20, 40., where the workload has .20000"):
        model.save(model.WORKLOADS["decode-wt103-640-trained"], str(tmp_path / "other"), (str(trained), str(data)))


def test_everything_on_a_gpu_outlives_a_step_that_hangs(tmp_path, monkeypatch, capsys):
    """Every step is given options that its script knows, and one that is stopped takes no other with it."""
    import gpu

    commands, compilers = [], []

    def start(command, environment, limit, grace):
        commands.append(command)
        compilers.append(environment.get("TORCHINDUCTOR_COMPILE_THREADS"))
        assert limit <= max(step.limit for step in gpu.STEPS) and grace > 0
        return None if len(commands) == 2 else 0

    monkeypatch.setattr(gpu, "run", start)
    monkeypatch.setattr(gpu, "check_packages", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path), "--minutes", "600"])
    assert gpu.main() == 1
    assert "failed: [1]" in capsys.readouterr().out
    assert len(commands) == len(gpu.STEPS)
    # First whether it is right, and last what takes long of that: flex_attention compiles for minutes.
    wanted = [("gpu and not slow", "not sm_90 and not flex_attention")]
    wanted += [("gpu and slow", "not sm_90"), ("gpu and not slow", "not sm_90 and flex_attention")]
    for place, (marks, chosen) in zip((0, -1, -1), wanted, strict=True):
        command = commands.pop(place)
        assert command[1:3] == ["-m", "pytest"] and compilers.pop(place) == "1"
        assert command[command.index("-m", 2) + 1] == marks and command[command.index("-k") + 1] == chosen
        names = [Path(path).name for path in command if "/tests/" in path]
        assert names[:2] == ["test_no_sync.py", "test_triton.py"]
        assert {"test_attention.py", "test_dropout.py"} <= set(names)
    # What is measured compiles in as many processes as it likes.
    assert set(compilers) == {os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")}
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # Without a GPU they get no further than to say so.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for _, script, *options in commands:
        with pytest.raises(SystemExit, match="torch sees no GPU"):
            importlib.import_module(Path(script).stem).main(options)


def test_a_contender_on_a_gpu_has_a_step_and_time_to_compile():
    import gpu

    for step in gpu.STEPS:
        if "--contenders" in step.options:
            contenders = " ".join(step.options).partition("--contenders ")[2].split()
            # Those of models have processes; what PyTorch itself brings is no danger to the others.
            assert step.script == "model" or set(contenders[1:]) <= {"sdpa", "auto"}
            for endings, least in ((("compile",), 100), (("static", "flex_attention"), 180)):
                slow = any(name.endswith(endings) for name in contenders)
                assert not slow or (len(contenders) == 1 and least <= step.limit <= 240), step
    assert [step.script for step in gpu.STEPS[:7]] == ["pytest", *["cudnn_probe"] * 2, "profile_step", *["model"] * 3]
    assert all("train-nvidia-base" in step.options for step in gpu.STEPS[3:7])
    assert sum(step.limit + 1 for step in gpu.STEPS[:7]) + gpu.GRACE <= 9 * 60, "one call has time for all of these"


def test_a_call_runs_the_steps_that_fit_and_says_with_what_to_go_on(tmp_path, monkeypatch, capsys):
    import gpu

    now, ran = [0.0], []

    def start(command, environment, limit, grace):
        ran.append(int(command[-1]))
        now[0] += limit + grace
        return None

    limits = (30, 60, 300, 100, 20)
    monkeypatch.setattr(gpu, "STEPS", [gpu.Step("growth", (str(n),), limit) for n, limit in enumerate(limits)])
    monkeypatch.setattr(gpu, "run", start)
    monkeypatch.setattr(gpu, "check_packages", lambda *_: None)
    monkeypatch.setattr(gpu, "time", argparse.Namespace(monotonic=lambda: now[0]))
    command = ["gpu.py", "--output", str(tmp_path), "--minutes", "6"]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu.main() == 3
    assert ran == [0, 1, 3, 4], "the third may take more than was left"
    monkeypatch.setattr(sys, "argv", [*command, *re.search(r"--skip [\d ]+$", capsys.readouterr().out)[0].split()])
    assert gpu.main() == 1
    assert ran == [0, 1, 3, 4, 2]


def test_a_run_on_a_gpu_has_the_optimiser_of_the_recipes_or_is_told_to_go_without(tmp_path, monkeypatch, capsys):
    import gpu

    find, ran = gpu.PathFinder.find_spec, []

    def find_elsewhere(name, places):
        return name != "pytorch_optimizer" or find(name, [place for place in places if place not in sys.path])

    monkeypatch.setattr(gpu, "PathFinder", argparse.Namespace(find_spec=find_elsewhere))
    monkeypatch.setattr(gpu, "WHEELS", tmp_path)
    monkeypatch.setattr(gpu, "STEPS", [gpu.Step("growth")])
    monkeypatch.setattr(gpu, "run", lambda *given: ran.append(given) or 0)
    command = ["gpu.py", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        gpu.main()
    said = capsys.readouterr().err.splitlines()[-1]
    assert "pytorch_optimizer cannot be imported" in said and str(tmp_path) in said and "--without-lamb" in said
    assert not ran
    monkeypatch.setattr(sys, "argv", [*command, "--without-lamb"])
    assert gpu.main() == 0
    with zipfile.ZipFile(tmp_path / "pytorch_optimizer-4.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pytorch_optimizer/__init__.py", "")
    monkeypatch.setattr(sys, "argv", command)
    assert gpu.main() == 0 and len(ran) == 2


def test_what_has_a_figure_to_reach_is_measured_behind_tests_probe_and_profile():
    import gpu
    import report

    bars = [bar for bar in report.BARS if bar.file != "gpu_train.csv"]

    def measured(step: gpu.Step) -> set[str]:
        # The script of the sliding window measures the memory unasked.
        options = {*step.options, "memory"}
        return {
            bar.name
            for bar in bars
            if bar.file == f"{step.script}.csv" and {bar.wanted.get("workload"), bar.wanted.get("contender")} & options
        }

    found = list(map(measured, gpu.STEPS))
    assert not any(found[:4])
    found = found[4:]
    assert set().union(*found) == {bar.name for bar in bars}
    assert sorted(map(bool, found), reverse=True) == list(map(bool, found))
    last = sum(map(bool, found))
    assert sum(step.limit for step in gpu.STEPS[: 4 + last]) <= 30 * 60


def test_tests_for_a_gpu_are_found_by_their_marks(tmp_path, monkeypatch):
    import gpu

    texts = {
        "test_marked.py": "pytestmark = [\n    pytest.mark.gpu,\n]\n",
        "test_both.py": "def test_one(\n    make_model, device\n):\n    pass\n",
        "test_without.py": "def test_one(devices):\n    device = 'pytest.mark.gpu'\n",
        "test_own.py": "@pytest.mark.parametrize(('a', 'device'), [(1, 2)])\ndef test_one(a, device):\n    pass\n",
        "helper.py": "@pytest.mark.gpu\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(gpu, "TESTS", tmp_path)
    assert [path.name for path in gpu.files_of_gpu_tests()] == ["test_both.py", "test_marked.py"]
    monkeypatch.setattr(gpu, "FIRST", ("test_marked.py",))
    assert [path.name for path in gpu.files_of_gpu_tests()] == ["test_marked.py", "test_both.py"]


@pytest.mark.slow
def test_tests_that_are_stopped_have_said_which_failed(tmp_path, capfd):
    import gpu

    path = tmp_path / "test_some.py"
    # This test may have a worker of xdist of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # The second asks as Ctrl-C does, and then hangs; with xdist it is not in the process that was asked.
    path.write_text(
        "import os, signal, time\n"
        "def test_bad():\n"
        "    assert 1 == 2\n"
        "def test_hangs():\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getppid() if 'PYTEST_XDIST_WORKER' in os.environ else os.getpid(), signal.SIGINT)\n"
        "    time.sleep(600)\n"
    )
    assert gpu.run([*gpu.tester(60), str(path)], environment, 120.0) == pytest.ExitCode.INTERRUPTED
    printed = capfd.readouterr().out
    assert re.search(r"test_bad FAILED|FAILED \S+test_bad", printed) and "assert 1 == 2" in printed


@pytest.mark.slow
def test_all_of_it_runs_at_tiny_sizes_without_a_gpu(tmp_path):
    process = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", "--smoke", "--output", tmp_path], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"model.csv", "attention_kernel.csv", "sliding_window.csv", "softmax.csv", "notes.txt"}
    assert len(names) <= 8, "a run leaves few files to copy"


def test_training_on_a_gpu_goes_part_by_part_and_goes_on(tmp_path, monkeypatch, capsys):
    """Each part has options that txl-train knows; what is done is not done again, what is cut short is resumed."""
    import gpu_train

    commands = []
    # The published figure to its digits, the whole time used up, and a figure that misses.
    answers = [("ptb", 60.1), ("ptb_average", 54.524), None, ("wikitext2", 63.2)]

    def start(command, environment, limit, grace):
        commands.append(command)
        assert 0 < limit <= 60 and grace > 0
        answer = answers[len(commands) - 1]
        if answer is None:
            return None
        folder = tmp_path / "runs" / answer[0]
        folder.mkdir(parents=True)
        figures = {"perplexity": answer[1], "bits_per_token": math.log2(answer[1])}
        (folder / "results.json").write_text(json.dumps({"validation": figures, "test": figures, "commit": None}))
        return 0

    monkeypatch.setattr(gpu_train.gpu, "run", start)
    options = ["--data", str(tmp_path), "--output", str(tmp_path / "runs"), "--minutes", "1"]
    with pytest.raises(SystemExit):
        gpu_train.main(options)
    assert f"{tmp_path / 'ptb'} is missing" in capsys.readouterr().err
    for corpus in ("ptb", "wikitext-2"):
        (tmp_path / corpus).mkdir()
    assert gpu_train.main(options) == 3
    assert gpu_train.main(options) == 0
    printed = capsys.readouterr().out
    assert "published 54.52: met" in printed and "published 63.1: missed" in printed and "out of time" in printed
    assert [row["recipe"] for row in read(tmp_path / "runs" / "gpu_train.csv")] == ["ptb", "ptb_average", "wikitext2"]
    assert len(commands) == 4 and commands[2] == commands[3]
    for command in commands:
        parsed = parse_arguments(command[2:])
        assert parsed.data.resume and Path(parsed.data.data).is_dir()
    assert parse_arguments(commands[1][2:]).model.model_name_or_path == str(tmp_path / "runs" / "ptb")


@pytest.mark.slow
def test_training_on_a_gpu_runs_at_tiny_sizes_without_one(tmp_path):
    command = [sys.executable, BENCHMARKS / "gpu_train.py", "--smoke", "--output", tmp_path]
    for parts in (["ptb"], []):
        process = subprocess.run([*command, *(["--parts", *parts] if parts else [])], capture_output=True, text=True)
        assert process.returncode == 0, process.stdout + process.stderr
    assert [row["recipe"] for row in read(tmp_path / "gpu_train.csv")] == ["ptb", "ptb_average", "wikitext2"]


def test_training_on_a_gpu_names_the_packages_that_it_lacks(tmp_path):
    """In a line, before anything is imported that takes long; a wheel that was brought along is there."""
    with zipfile.ZipFile(tmp_path / "dill-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("dill/__init__.py", "")
    script = (
        "import sys\nfrom pathlib import Path\nimport gpu, gpu_train\n"
        "gpu.WHEELS = Path(sys.argv[1])\n"
        # What stands beside the scripts, and no package.
        "sys.path[:] = sys.argv[2:3]\n"
        "try:\n    gpu_train.main(['--smoke', '--output', sys.argv[1]])\n"
        "finally:\n    print('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, tmp_path, BENCHMARKS]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 2 and process.stdout == "False\n"
    last = process.stderr.splitlines()[-1]
    assert "datasets, multiprocess cannot be imported" in last and str(tmp_path) in last


@pytest.mark.slow
def test_a_command_that_is_asked_to_end_may_do_so(tmp_path):
    import gpu

    script = (
        "import time, pathlib\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pathlib.Path('{}').touch()"
    )
    command = [sys.executable, "-c", script.format(tmp_path / "asked")]
    # As where a script has started all of it in the background.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert gpu.run(command, dict(os.environ), 3, grace=20) is None
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "asked").exists()


def test_wheels_that_are_brought_along_are_found(tmp_path, monkeypatch):
    """Of pure Python, as they are."""
    import gpu

    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "answer = 42")
    monkeypatch.setattr(gpu, "WHEELS", tmp_path)
    check = "import carried, txl_hf; raise SystemExit(carried.answer)"
    assert gpu.run([sys.executable, "-c", check], gpu.environment(), 60.0) == 42


def test_a_profile_and_the_probe_of_attention_are_written(tmp_path):
    import cudnn_probe
    import profile_step

    notes = tmp_path / "notes.txt"
    for script in (profile_step, cudnn_probe):
        assert script.main(["--smoke", *CPU, "--output", str(notes)]) == 0
    text = notes.read_text()
    assert "a step takes" in text
    found = re.findall(r"^(\w+) L \d+ K \d+: (.*)", text, re.MULTILINE)
    assert len(found) == len(cudnn_probe.CONTENDERS) * len(cudnn_probe.PAIRS)
    # There is no cuDNN on a CPU: it alone is asked, and what it says is a line.
    for name, line in found:
        assert line.startswith("fails: ") if name == "cudnn" else "error " in line


def quarter(plan: str, **variables: str) -> list[tuple[int, list[str]]]:
    """The steps of a plan of `gpu_quarter.sh`, each with its limit, run or, with DRY, not."""
    command = ["bash", str(BENCHMARKS / "gpu_quarter.sh"), plan]
    environment = os.environ | {"PYTHON": sys.executable} | variables
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    steps = [line.removeprefix("== ").split(" s: ", 1) for line in found.stdout.splitlines() if line.startswith("== ")]
    return [(int(limit), words.split()) for limit, words in steps]


@pytest.mark.parametrize("plan", ["kernels", "tests", "train", "weights", "conformer"])
def test_a_plan_for_a_quarter_of_an_hour_fits_and_its_scripts_know_its_words(plan, capsys):
    import attention_kernel
    import model

    steps = quarter(plan, DRY="1")
    assert 0 < sum(limit for limit, _ in steps) <= 585
    for _, (_, *words) in steps:
        script = next((word for word in words if word.endswith(".py")), "")
        if script == "examples/train_lm.py":
            arguments = parse_arguments(words[words.index(script) + 1 :])
            assert arguments.training.max_steps > 0
        elif script:
            module = importlib.import_module(Path(script).stem)
            with pytest.raises(SystemExit):
                module.main(["--help"])
            said = capsys.readouterr().out
            assert all(word in said for word in words if word.startswith("--"))
            given = dict(zip(words, words[1:], strict=False))
            workload = given.get("--workload", given.get("--workloads"))
            assert workload is None or workload in model.WORKLOADS
            if "--shapes" in words:
                assert attention_kernel.SHAPES.keys() >= {*words[words.index("--shapes") + 1 :]}


def test_what_measures_todays_code_is_left_out_of_a_plan():
    name = "train-nvidia-base:ours-txl_triton-compile"
    assert len(quarter("kernels", DRY="1", CURRENT="")) == len(quarter("kernels", DRY="1", CURRENT=f"a:b {name}")) + 1


def test_a_row_is_current_until_what_it_measures_changes(tmp_path, monkeypatch, capsys):
    import current
    import harness

    def commit(name: str) -> str:
        file = tmp_path / "src" / "txl_hf" / name / "a.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a")
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", name]):
            subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
        head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True)
        return head.stdout.strip()

    monkeypatch.setattr(current, "ROOT", tmp_path)
    row = {"date": "2026-11-29", "processor": "NVIDIA H200", "contender": "ours"}
    first = commit("kernels")
    rows = [row | {"workload": workload, "commit": first} for workload in ("train-a", "evaluate-a", "decode-a")]
    rows.append(row | {"workload": "train-b", "commit": first, "processor": "AMD EPYC"})
    rows.append(row | {"workload": "train-c", "commit": f"{first}-dirty"})
    harness.append(tmp_path / "model.csv", rows)
    command = ["--results", str(tmp_path)]
    for changed, left in [("legacy", "train-a evaluate-a decode-a"), ("training", "evaluate-a decode-a")]:
        commit(changed)
        current.main(command)
        assert capsys.readouterr().out == " ".join(f"{name}:ours" for name in left.split()) + "\n"
    last = commit("kernels/triton")
    current.main([*command, "--all"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("older" in line for line in lines)
    harness.append(tmp_path / "model.csv", [row | {"workload": "train-a", "commit": last}])
    current.main(command)
    assert capsys.readouterr().out == "train-a:ours\n"


def test_the_weights_of_a_run_come_back_in_parts(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    weights = {"a": torch.randn(3, 5_000_000), "b": torch.arange(3)}
    safetensors.torch.save_file(weights, run / "model.safetensors")
    for name in ("results.json", "config.json"):
        (run / name).write_text("{}")
    quarter("weights", OUT=str(out), RUN=str(run))
    parts = sorted(out.glob("model.safetensors.*"))
    assert [part.stat().st_size > 2**24 for part in parts] == [False, False]
    assert (out / "results.json").exists() and not (out / "model.safetensors").exists()
    # The plan that joins them goes on with tune_lm.py, which has its own tests.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 0\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    quarter("read", OUT=str(out), PYTHON=str(python), CURRENT="")
    found = safetensors.torch.load_file(out / "model.safetensors")
    assert torch.equal(found["a"], weights["a"].bfloat16()) and torch.equal(found["b"], weights["b"])


@pytest.mark.parametrize(("workload", "does"), [("smoke-evaluate", "aten::addmm"), ("smoke-decode", "aten::argmax")])
def test_an_evaluation_and_a_decoded_text_are_profiled(tmp_path, workload, does):
    """`smoke-decode` ended in an AttributeError: nobody had read its prompt."""
    import profile_step

    notes = tmp_path / "notes.txt"
    assert profile_step.main(["--smoke", "--workload", workload, *CPU, "--output", str(notes)]) == 0
    text = notes.read_text()
    assert text.startswith(workload) and "a step takes" in text and does in text


def test_what_plain_attention_is_probed_with_is_the_whole_bias(monkeypatch):
    """With any kernel in the place of cuDNN it computes what ours does."""
    import torch.nn.attention

    import cudnn_probe

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    cudnn_probe.offer_cudnn()
    line = cudnn_probe.describe("cudnn", 3, 67, argparse.Namespace(device="cpu", dtype="fp32"))
    assert float(line.rpartition("error ")[2]) < 1e-5


def test_a_kernel_counts_once_in_a_profile():
    from torch.autograd import DeviceType

    import profile_step

    def event(device_type, time, is_user_annotation=False):
        values = {"device_type": device_type, "is_user_annotation": is_user_annotation}
        return argparse.Namespace(self_device_time_total=time, self_cpu_time_total=7, **values)

    events = [event(DeviceType.CPU, 100), event(DeviceType.CUDA, 60), event(DeviceType.CUDA, 40)]
    # What the optimiser calls its step.
    events += [event(DeviceType.CPU, 0, True), event(DeviceType.CUDA, 100, True)]
    assert profile_step.busy(events, cuda=True) == pytest.approx(100e-6)
    assert profile_step.busy(events, cuda=False) == pytest.approx(35e-6)


def test_bars_are_met_missed_or_not_measured(tmp_path, monkeypatch, capsys):
    import harness
    import report

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    row = {"date": "2026-01-01", "commit": "", "processor": "NVIDIA H200", "contender": "ours", "dtype": "bf16"}
    recipe = row | {"optimizer": "Lamb", "dropout": 0.1, "dropatt": 0.0, "tokens_per_second_p50": 449_890}
    base = recipe | {"workload": "train-nvidia-base"}
    large = {"workload": "train-nvidia-large", "dropout": 0.2, "dropatt": 0.2, "tokens_per_second_p50": 140_000}
    scoring = row | {"workload": "evaluate-nvidia-base-640-b1", "tokens_per_second_p50": 6_936}
    harness.append(tmp_path / "model.csv", [base, recipe | large, scoring])
    mode = {"contender": "txl_triton", "mode": "forward"}
    shapes = [row | mode | {"shape": name, "of_sdpa": of} for name, of in (("a", 0.9), ("b", 0.4))]
    harness.append(tmp_path / "attention_kernel.csv", shapes)
    perplexities = {"ptb_average": 54.53, "wikitext2": 63.13}
    trained = [row | {"recipe": name, "test_perplexity": value} for name, value in perplexities.items()]
    trained += [row | {"recipe": name, "test_bits_per_token": 0.994} for name in ("enwik8_large", "text8_large")]
    (tmp_path / "elsewhere").mkdir()
    harness.append(tmp_path / "elsewhere" / "gpu_train.csv", trained)
    monkeypatch.setattr(report, "fill", lambda text: text)
    for plot in ("plot_speed", "plot_growth"):
        monkeypatch.setattr(report, plot, lambda: None)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    for page in map(tmp_path.joinpath, report.PAGES):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.touch()
    assert report.main(["--add", str(tmp_path / "elsewhere")]) == 0
    with pytest.raises(SystemExit, match="has no rows that are not here already"):
        report.main(["--add", str(tmp_path / "elsewhere")])
    harness.append(tmp_path / "old" / "gpu_train.csv", [trained[0] | {"date": "2025-12-31"}])
    with pytest.raises(SystemExit, match="has a row of 2025-12-31, and here is one of 2026-01-01: nothing added"):
        report.main(["--add", str(tmp_path / "old")])
    assert len(harness.read(tmp_path / "gpu_train.csv")) == 4
    verdicts = judged(capsys)
    assert {verdicts[name] for name in ("NVIDIA base, 8 A100", "large on one GPU", "NVIDIA base-640-b1")} == {"met"}
    assert verdicts["NVIDIA large, 8 A100"] == verdicts["of plain sdpa, forward"] == "missed"
    assert verdicts["the paper's at 3,800"] == "not measured"
    assert (verdicts["test perplexity, ptb_average"], verdicts["test perplexity, wikitext2"]) == ("missed", "met")
    assert verdicts["test bits per token, enwik8_large"] == verdicts["test bits per token, text8_large"] == "met"
    assert verdicts["test perplexity, wt103_large"] == verdicts["test bits per token, enwik8_base"] == "not measured"


def test_every_figure_that_a_recipe_names_as_published_is_a_bar():
    import report

    def published(path):
        """The first one that its first lines name."""
        said = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
        named = re.search(r"(?:Published|reports) ?(?:test perplexity)?:? ([\d.]+\d)", said)
        return float(named[1]) if named else None

    # Penn Treebank's figure is that of both parts; an ablation has one for each of its rows.
    paths = [path for path in (report.ROOT / "examples" / "recipes").glob("*.yaml") if path.stem != "ptb"]
    found = {path.stem: published(path) for path in paths if not path.stem.endswith("_ablation")}
    bars = {bar.wanted["recipe"]: bar.figure for bar in report.BARS if bar.file == "gpu_train.csv"}
    # One reproduction reports what the figure to reach was rounded from.
    assert {name: figure for name, figure in found.items() if figure} == bars | {"wikitext2": 63.13}


def judged(capsys) -> dict[str, str]:
    import report

    capsys.readouterr()
    assert report.main(["--bars"]) == 0
    return {line[14:48].strip(): line[:12].strip() for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize(
    "changes",
    [
        {"contender": "floor"},
        {"contender": "gpt2"},
        {"contender": "legacy"},
        {"contender": "ours-eager"},
        {"contender": "ours-int8"},
        {"dtype": "fp32"},
        {"optimizer": "AdamW"},
        {"dropout": 0.0},
        {"processor": "AMD EPYC"},
    ],
    ids=str,
)
def test_what_another_program_reaches_meets_no_bar(tmp_path, monkeypatch, capsys, changes):
    import harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    row = {"date": "2026-01-01", "commit": "", "processor": "NVIDIA H200", "dtype": "bf16", "contender": "ours"}
    row |= {"dropout": 0.2, "dropatt": 0.2, "optimizer": "Lamb", "workload": "train-nvidia-large"}
    slow, fast = row | {"tokens_per_second_p50": 50_000}, row | changes | {"tokens_per_second_p50": 9_500_000}
    harness.append(tmp_path / "model.csv", [slow, fast])
    assert judged(capsys)["large on one GPU"] == "missed"


def test_the_last_run_meets_a_bar_and_not_the_best(tmp_path, monkeypatch, capsys):
    import harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    row = {"commit": "", "processor": "NVIDIA H200", "dtype": "bf16", "contender": "ours"}
    row |= {"dropout": 0.2, "dropatt": 0.2, "optimizer": "Lamb", "workload": "train-nvidia-large"}
    rates = {"2026-01-01": 140_000, "2026-01-02": 120_000}
    harness.append(tmp_path / "model.csv", [row | {"date": d, "tokens_per_second_p50": n} for d, n in rates.items()])
    assert judged(capsys)["large on one GPU"] == "missed"


def test_the_front_page_shows_the_machine_of_each_maker_that_was_measured_last(tmp_path, monkeypatch):
    import harness
    import report

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    dates = {"AMD EPYC (family 25)": "2026-01-02", "AMD EPYC (family 26)": "2026-01-01", "Intel Xeon": "2025-01-01"}
    rows = [
        {"date": date, "processor": processor, "threads": 2, "dtype": "fp32", "contender": contender}
        | {"workload": "train-enwik8", "tokens_per_second_p50": 100, "times_legacy_p50": 1}
        for processor, date in dates.items()
        for contender in ("ours", "legacy")
    ]
    # Ours alone says nothing of how much faster it is.
    rows.append(rows[0] | {"date": "2026-01-03", "processor": "AMD EPYC (family 17)"})
    harness.append(tmp_path / "model.csv", rows)
    header = report.short_table().splitlines()[1]
    assert "family 25" in header and "Intel" in header and "family 26" not in header and "family 17" not in header


@pytest.mark.slow
def test_a_step_that_is_stopped_takes_its_processes_with_it(tmp_path):
    import gpu

    child = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    started = tmp_path / "started"
    assert gpu.run([sys.executable, "-c", parent, child, str(started)], dict(os.environ), 5.0) is None
    process = int(started.read_text())
    deadline = time.monotonic() + 30
    # Where nobody collects what has lost its parent, it stays in the table.
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert gpu.run([sys.executable, "-c", "raise SystemExit(2)"], dict(os.environ), 30.0) == 2


def test_gpt2_is_asked_for_no_memory(tmp_path, capsys):
    import model

    with pytest.raises(SystemExit):
        model.main(["--smoke", "--output", str(tmp_path / "rows.csv"), "--contenders", "ours", "gpt2"])
    assert "leave it out of --contenders, or run smoke-evaluate apart" in capsys.readouterr().err


def test_a_wrong_contender_is_not_timed(tmp_path, forked, monkeypatch):
    """One bias too large by a tenth in one layer of `ours`: only the others are timed, and the program fails."""
    import model

    broken = tmp_path / "broken.py"
    broken.write_text(
        "import model\n"
        "load = model.load\n"
        "def wrong(contender, *arguments):\n"
        "    loaded = load(contender, *arguments)\n"
        "    if contender == 'ours':\n"
        "        loaded.transformer.layers[0].self_attn.position_bias.data.mul_(1.1)\n"
        "    return loaded\n"
        "model.load = wrong\n"
        "model.main()\n"
    )
    monkeypatch.setattr(model, "SCRIPT", str(broken))
    output = tmp_path / "model.csv"
    options = ["--workloads", "smoke-train", "--contenders", "ours", "ours-mems", "--output", str(output)]
    with pytest.raises(SystemExit, match="^error: ours has other losses than ours-eager"):
        model.main(["--smoke", *CPU, *options])
    assert [row["contender"] for row in read(output)] == ["ours-mems"]


def test_the_gate_takes_neither_another_text_nor_nan():
    import model

    right = {"nll": [1.0, 2.0], "text": [3, 4]}

    def gate(task: str, ours: dict, dtype: str) -> tuple[float | None, str]:
        differences, wrong = model.gate(task, {"ours-eager": right, "ours": ours}, dtype)
        assert differences["ours-eager"] == 0 and wrong.keys() <= {"ours"}
        return differences.get("ours"), wrong.get("ours", "")

    assert gate("decode", right, "fp32") == (0, "")
    assert "another text" in gate("decode", right | {"text": [3, 5]}, "fp32")[1]
    assert "other losses" in gate("train", {"nll": [1.0, float("nan")]}, "fp32")[1]
    # Where rounding decides between two tokens, what follows is another text.
    other = {"nll": [1.0, 2.001], "text": [5, 4]}
    assert gate("decode", other, "bf16") == (0, "")
    assert "other losses" in gate("decode", other | {"nll": [1.11, 2.0]}, "bf16")[1]
    # Two roundings of one logit; of a mean they would be an error.
    rounded = {"nll": [1.0625, 2.0]}
    assert gate("decode", other | rounded, "bf16") == (0.0625, "")
    assert all("other losses" in gate(task, rounded, "bf16")[1] for task in ("train", "evaluate"))
    # Contenders of another type than the run's are held to theirs.
    checks = {"ours-eager": right, "ours-bf16": other, "ours-int8": other | {"nll": [1.09, 2.0]}, "ours": other}
    assert model.gate("decode", checks, "fp32")[1].keys() == {"ours"}
    checks = {"ours-eager": right, "ours-bf16": other | {"nll": [1.2, 2.0]}, "ours-int8": other | {"nll": [1.2, 2.0]}}
    assert model.gate("decode", checks, "fp32")[1].keys() == {"ours-bf16", "ours-int8"}


def test_sliding_window(tmp_path):
    import sliding_window

    output = tmp_path / "sliding_window.csv"
    sliding_window.main(["--smoke", *CPU, "--output", str(output)])
    rows = read(output)
    assert {row["contender"] for row in rows} == {"memory", "vanilla", "gpt2"}
    for row in rows:
        if row["contender"] == "memory":
            rates = {
                other["contender"]: float(other["tokens_per_second_p50"])
                for other in rows
                if other["attention_length"] == row["attention_length"]
            }
            assert rates[row["over"]] == max(rates["vanilla"], rates["gpt2"]), "the faster one counts"


def test_conformers_are_measured_after_they_are_equal(tmp_path, monkeypatch):
    import conformer

    output = tmp_path / "conformer.csv"
    conformer.main(["--smoke", *CPU, "--train", "16", "--output", str(output)])
    rows = read(output)
    assert {row["contender"] for row in rows} == {"ours", "sdpa", "eager"}
    measured = {*itertools.product(("encoder", "attention"), "24"), ("training-b2", "2")}
    assert {(row["part"], row["audio_s"]) for row in rows} == measured
    assert all(float(row["seconds_p50"]) > 0 and float(row["difference"]) < 1e-4 for row in rows)
    # A wrong contender ends the run before anything of it is written.
    monkeypatch.setattr(conformer, "TOLERANCE", {"fp32": -1.0})
    with pytest.raises(SystemExit, match="off by"):
        conformer.main(["--smoke", *CPU, "--output", str(tmp_path / "wrong.csv")])
    assert not (tmp_path / "wrong.csv").exists()


PPO_TRXL = """
import sys, time
import gymnasium

if __name__ == "__main__":
    options = dict(option.split("=") for option in sys.argv[1:] if "=" in option)
    environment = gymnasium.make(options["--env_id"], render_mode="debug_rgb_array")
    assert environment.reset()[0].shape == (4,) and options["--trxl_dim"] == "16" and options["--num_steps"] == "8"
    while True:
        time.sleep(0.2)
        list(reversed(range(3)))
        time.sleep(0.1)
        print("an iteration")
"""


def test_agents_beside_a_loop_that_runs_as_it_is(forked, tmp_path):
    """One that says where it is as CleanRL's does; it rolls out 0.2 s and learns 0.1 s."""
    pytest.importorskip("popgym")
    import agents

    script, output = tmp_path / "ppo_trxl.py", tmp_path / "agents.csv"
    script.write_text(PPO_TRXL)
    sizes = ["--width", "16", "--num_envs", "4", "--window", "8", "--memory_length", "4"]
    agents.main(["--smoke", *CPU, *sizes, "--cleanrl", str(script), "--output", str(output)])
    rows = {row["contender"]: row for row in read(output)}
    assert list(rows) == ["ours", "cleanrl"]
    for row in rows.values():
        for part in ("rollout", "learning"):
            low, middle, high = (float(row[f"{part}_steps_per_second_p{p}"]) for p in (20, 50, 80))
            assert 0 < low <= middle <= high and float(row[f"{part}_processor_ms"]) > 0
    rollout, learning = (float(rows["cleanrl"][f"{part}_steps_per_second_p50"]) for part in ("rollout", "learning"))
    assert 0 < rollout <= 32 / 0.2 and 0 < learning <= 32 / 0.1
    assert float(rows["cleanrl"]["rollout_processor_ms"]) < 200, "it slept"


def test_growth_and_its_exponents(tmp_path):
    import growth

    output = tmp_path / "growth.csv"
    growth.main(["--smoke", *CPU, "--output", str(output)])
    assert {row["axis"] for row in read(output)} == {"memory", "segment", "text"}

    rows = [{"axis": "", "task": "", "length": n, "seconds_p50": n**2, "peak_mib": 10.0 * n} for n in (2, 4, 8, 16)]
    fitted = growth.with_exponents(rows, "seconds_p50", "peak_mib")[0]
    assert fitted["seconds_exponent_all"] == fitted["seconds_exponent_last"] == 2
    assert fitted["peak_mib_exponent_all"] == 1


def test_growth_keeps_what_was_measured_before_it_was_stopped(tmp_path, monkeypatch):
    import growth

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(growth, "read_text", stopped)
    output = tmp_path / "growth.csv"
    with pytest.raises(KeyboardInterrupt):
        growth.main(["--smoke", *CPU, "--output", str(output)])
    assert {row["axis"] for row in read(output)} == {"memory", "segment"}


def test_attention_and_its_gate(tmp_path, monkeypatch, capsys):
    import attention_kernel

    output = tmp_path / "attention_kernel.csv"
    options = ["--smoke", *CPU, "--output", str(output)]
    assert attention_kernel.main(options) == 0
    assert {row["contender"] for row in read(output)} == {"auto", "eager", "sdpa"}
    assert {row["mode"] for row in read(output)} == {"forward", "forward+backward"}

    written = read(output)
    monkeypatch.setitem(attention_kernel.CONTENDERS, "auto", attention_kernel.plain)
    assert attention_kernel.main(options) == 1
    assert "auto: FAILED" in capsys.readouterr().out
    # The others are timed all the same.
    assert {row["contender"] for row in read(output)[len(written) :]} == {"eager", "sdpa"}


def test_attention_is_measured_at_every_width_of_heads_that_a_model_for_a_gpu_has():
    """Widths that are padded to one are one. Those of enwik8's large model were left out."""
    import attention_kernel
    import gpu
    import model

    asked = {option for step in gpu.STEPS for option in step.options} & model.WORKLOADS.keys()
    heads = {model.MODELS[model.WORKLOADS[name].model]["d_head"] for name in asked}
    shapes = {shape[-1] for shape in attention_kernel.SHAPES.values()}
    assert {-(-width // 16) for width in heads} <= {-(-width // 16) for width in shapes}


def test_an_attention_that_raises_takes_nobody_with_it(tmp_path, monkeypatch, capsys):
    import attention_kernel

    def fails(inputs):
        raise RuntimeError("no room\nat all")

    monkeypatch.setitem(attention_kernel.CONTENDERS, "auto", fails)
    output = tmp_path / "attention_kernel.csv"
    assert attention_kernel.main(["--smoke", *CPU, "--output", str(output)]) == 1
    assert "auto: FAILED: RuntimeError: no room\n" in capsys.readouterr().out
    assert {row["contender"] for row in read(output)} == {"eager", "sdpa"}


def test_each_attention_apart_is_one_run(tmp_path, monkeypatch, capsys):
    """Steps of their own that all need the floor make rows that one table holds; a shape that fails is its own."""
    import attention_kernel
    import report

    output = tmp_path / "attention_kernel.csv"
    for contenders in (["eager", "sdpa"], ["auto"]):
        options = ["--smoke", *CPU, "--output", str(output), "--contenders", *contenders]
        assert attention_kernel.main(options) == 0
    for run in report.latest("attention_kernel.csv", read(output)).values():
        assert list(run) == ["eager", "sdpa", "auto"]

    measure = attention_kernel.measure

    def full(shape, mode, *rest):
        if mode == "forward":
            raise RuntimeError("no room")
        return measure(shape, mode, *rest)

    monkeypatch.setattr(attention_kernel, "measure", full)
    written = read(output)
    assert attention_kernel.main(options) == 1
    assert "smoke forward: FAILED: RuntimeError: no room\n" in capsys.readouterr().out
    assert [row["mode"] for row in read(output)[len(written) :]] == ["forward+backward"]


def test_softmax(tmp_path, forked):
    import softmax

    softmax.main(["--smoke", *CPU, "--output", str(tmp_path / "softmax.csv")])
    assert [row["contender"] for row in read(tmp_path / "softmax.csv")] == ["ours", "full"]


@pytest.mark.slow
def test_threads_beside_another_program(tmp_path):
    import threads

    names = ["one thread", "as torch", "passive", "briefly"]
    threads.main(["--smoke", "--busy", "1", "--output", str(tmp_path / "threads.csv")])
    rows = read(tmp_path / "threads.csv")
    assert [row["setting"] for row in rows] == names
    assert all(float(row["tokens_per_second_p50"]) > 0 and row["busy"] == "1" for row in rows)


def test_smoke_figures_never_reach_the_results():
    import growth
    import threads

    with pytest.raises(SystemExit, match="name another file with --output"):
        growth.main(["--smoke", *CPU])
    with pytest.raises(SystemExit, match="name another file with --output"):
        threads.main(["--smoke"])


def test_flops_are_those_of_the_recipes():
    """Per target, forward and backward: 0.51 G for NVIDIA's base model and 1.91 G for the large one."""
    import harness
    import model

    for name, length, batch, known in (("nvidia-base", 192, 256, 0.51e9), ("nvidia-large", 384, 128, 1.91e9)):
        config = model.MODELS[name]
        ids = harness.draw_ids(config["vocab_size"], (100_000,))
        shares = harness.bin_shares(ids, config["cutoffs"], config["vocab_size"])
        assert sum(shares) == pytest.approx(1)
        assert shares[0] == pytest.approx(0.93, abs=0.01)
        flops = harness.flops_per_token(config, length, length, batch, "train", shares)
        assert flops == pytest.approx(known, rel=0.1)


def test_a_matrix_product_counts_as_the_formula_says():
    """The formula against torch's own counter, on one segment without a memory."""
    from torch.utils.flop_counter import FlopCounterMode

    import harness
    import model
    from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

    config = model.ENWIK8 | {"n_layer": 2, "mem_len": 0}
    network = TransfoXLForCausalLM(TransfoXLConfig(**config))
    network.set_attn_implementation("eager")
    length = 64
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        # With gradients and without oneDNN, so that no product is hidden in a fused operator.
        network(torch.ones(1, length, dtype=torch.long))
    formula = length * harness.flops_per_token(config, length, 0, 1, "evaluate", [1.0])
    # Eager computes what it hides as well: L keys, not (L + 1) / 2; and W_R R, which evaluation has from before.
    width = config["n_head"] * config["d_head"]
    hidden = 2 * width * 3 * (length - (length + 1) / 2) * length
    positions = 2 * config["d_model"] * width * length
    assert counter.get_total_flops() == pytest.approx(formula + 2 * (hidden + positions), rel=0.01)


def test_rows_of_earlier_versions_stay(tmp_path):
    import harness

    path = tmp_path / "rows.csv"
    harness.append(path, [{"a": 1, "b": 2}])
    harness.append(path, [{"a": 3, "c": 4}])
    assert path.read_text() == "a,b,c\n1,2,\n3,,4\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


def test_the_tables_are_those_of_the_committed_rows():
    import report

    assert report.main(["--check"]) == 0
    text = "".join((report.ROOT / page).read_text(encoding="utf-8") for page in report.PAGES)
    assert set(re.findall(r"<!-- ([\w-]+): ", text)) == set(report.TABLES)
    row = next(row for row in read_model_rows() if row["contender"] == "ours")
    assert row["workload"] in text


@pytest.mark.parametrize("path", ["benchmarks/README.md", "docs/settings.md"])
def test_sentences_have_figures_of_measured_tables(path):
    """Each with a comma or a decimal point stands in a table of the page, of threads, or of the results' pages."""
    import report

    page = (report.ROOT / path).read_text(encoding="utf-8")
    prose = re.sub(r"<!-- .*?<!-- end of [\w-]+ -->|^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    # Versions, a compute capability, a vocabulary and two segments.
    known = {"4.35.2", "3.4", "8.0", "267,735", "1,024", "4,096"}
    said = {text for text in re.findall(r"\d[\d,.]*\d", prose) if "." in text or "," in text} - known
    tables = "".join(report.TABLES[name]() for name in [*re.findall(r"<!-- ([\w-]+): ", page), "threads"])
    tables = re.sub(r"[\w-]+ \(M = .*?\)", "", tables)
    if path.startswith("docs"):
        tables += "".join(path.read_text(encoding="utf-8") for path in (report.ROOT / "examples/results").glob("*.md"))
    measured = set(re.findall(r"\d[\d,.]*\d", tables))
    assert len(said) > 5 and said - measured == set()


def read_model_rows() -> list[dict[str, str]]:
    with (BENCHMARKS / "results" / "model.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_changed_figure_makes_the_tables_stale(tmp_path, monkeypatch, capsys):
    import harness
    import report

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    rows = read_model_rows()
    harness.append(tmp_path / "model.csv", [row | {"tokens_per_second_p50": "12345.0"} for row in rows])
    assert report.main(["--check"]) == 1
    assert "benchmarks/README.md" in capsys.readouterr().err


def test_workloads_are_in_one_order_on_all_machines_whenever_they_were_run(tmp_path, monkeypatch):
    import harness
    import report

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    runs = ["NVIDIA train-y 1", "a decode-x 1", "a train-y 1", "b train-y 1", "b evaluate-z 1"]
    runs += ["b decode-x 1", "a train-y 2"]
    for processor, workload, commit in map(str.split, runs):
        row = {"date": "2026-11-21", "commit": commit, "processor": processor, "threads": 2, "dtype": "fp32"}
        harness.append(tmp_path / "model.csv", [row | {"workload": workload, "contender": "ours"}])
    machines = {where[0]: runs for where, runs in report.machines_of("model.csv").items()}
    assert [(name, list(runs)) for name, runs in machines.items()] == [
        ("a", ["train-y", "decode-x"]),
        ("b", ["train-y", "evaluate-z", "decode-x"]),
        ("NVIDIA", ["train-y"]),
    ]
    assert machines["a"]["train-y"]["ours"]["commit"] == "2"


def test_drift_of_a_ratio(tmp_path, capsys):
    import harness
    import report

    def results(name: str, *ratios: float, processor: str = "p") -> str:
        row = {"date": "2026-11-21", "commit": "c", "processor": processor, "threads": 2, "dtype": "fp32"}
        row |= {"workload": "w", "contender": "ours"}
        for ratio in ratios:
            harness.append(tmp_path / name / "model.csv", [row | {"times_legacy_p50": ratio}])
        return str(tmp_path / name)

    old = results("old", 3.0)
    assert report.main(["--compare", old, results("near", 3.2)]) == 0
    assert report.main(["--compare", old, results("far", 3.4)]) == 1
    assert "1 of 1 ratios moved by more than 10%" in capsys.readouterr().out
    assert report.main(["--compare", old, results("appended", 3.0, 3.4)]) == 1
    # What was measured before is not what was measured again.
    assert report.main(["--compare", old, results("untouched", 3.0)]) == 1
    assert "no row" in capsys.readouterr().err
    assert report.main(["--compare", old, results("elsewhere", 3.0, processor="another")]) == 0
    assert "nothing to compare" in capsys.readouterr().out
