"""Every block of docs/clients.md, typed section by section as it stands, in a folder that looks like a clone, beside a
model that the demo wrote.

What differs from what a reader types, for the sake of time and of a machine with no network: ports are free ones,
RecurrentPPO takes fewer steps, and the task `wikitext` of lm_eval has a text of its own in the place of WikiText-2.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
# The Python above the first heading begins that of every section.
HEAD, *PARTS = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)
SECTIONS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# What goes on until it is stopped, and pages that it shows then.
SERVERS = {
    "txl-serve": ["/health"],
    "space/app.py": ["/"],
    "http.server": ["/", "/model/config.json", "/node_modules/onnxruntime-web/package.json"],
}
SHORTER = {"recurrent_ppo.py": " --steps 512"}
# Some of what the blocks of a section print.
PRINTED = {
    "Generate": [f"{name}: def main(" for name in ("pipeline", "batch", "beams", "stop string", "assistant")],
    "Tokenizers": ["<unk> <pad> <eos>"],
    "Serve": ['"content":', " tokens in ", "streamed: "],
    "Trainer": ["train_loss"],
    "TRL": ["mean_token_accuracy", "rewards/chosen", "rewards/brackets"],
    "PEFT": [f"{kind}: trainable params" for kind in ("LORA", "ADALORA", "PROMPT_TUNING", "P_TUNING")],
    "Quantise": ["Linear4bit"],
    "lm_eval": ["word_perplexity"],
    "ONNX": ["def main(", "step: "],
    "Pages": ["segment.onnx: at most", "GET /model/config.json"],
    "stable-baselines3": ["of 32 episodes"],
    "Corpora that stream": ["tensor(["],
}
# Seconds, on a machine that does other things beside.
PATIENCE = 1500
pytestmark = pytest.mark.timeout(2 * PATIENCE)

TASK = """
task: wikitext
dataset_path: text
dataset_kwargs: {{data_files: {folder}/book.txt}}
output_type: loglikelihood_rolling
test_split: train
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """The commands of the package, and those of others that the page types, under the Python of this test."""
    folder = tmp_path_factory.mktemp("bin")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    for name, function in (scripts | {"transformers": "transformers.cli.transformers:main"}).items():
        module, _, function = function.partition(":")
        code = f"import sys; from {module} import {function}; sys.argv[0] = {name!r}; sys.exit({function}())"
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(code)} "$@"\n')
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for path in folder.iterdir():
        path.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def demo_output(tmp_path_factory) -> Path:
    """The folder that the demo writes after three steps of a small model."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "text.txt").write_text((ROOT / "examples" / "demo.py").read_text(encoding="utf-8") * 2)
    options = "--text text.txt --steps 3 --layers 1 --width 32".split()
    command = [sys.executable, ROOT / "examples" / "demo.py", *options]
    demo = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert demo.returncode == 0, demo.stderr
    return folder / "demo-output"


class Terminal:
    """Commands in a folder, one after the other; servers go on beside those that follow."""

    def __init__(self, folder: Path, programs: Path):
        self.folder, self.servers, self.port = folder, [], free_port()
        self.printed = folder / "printed"
        self.environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "GRADIO_SERVER_PORT": str(self.port),
            "GRADIO_ANALYTICS_ENABLED": "False",
            "COLUMNS": "300",
        }

    def type(self, line: str):
        line = self.here(line)
        line += next((more for script, more in SHORTER.items() if script in line), "")
        if "lm_eval" in line:
            line += " --include_path ."
        if line.startswith("transformers chat"):
            # It asks the server which models it has, as it would ask the Hub.
            line = f"printf '%s\\n' 'def main(' n '!exit' | HF_HUB_OFFLINE=0 {line}"
        server = next((name for name in SERVERS if name in line), None)
        with self.printed.open("a") as printed:
            process = subprocess.Popen(
                ["bash", "-ec", line],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if server is None:
            assert process.wait(PATIENCE) == 0, line + "\n" + self.printed.read_text()[-3000:]
            return
        self.servers.append(process)
        for path in SERVERS[server]:
            self.wait_for(path, process)

    def here(self, text: str) -> str:
        """With the port that is free."""
        return re.sub(r"\b8000\b", str(self.port), text)

    def wait_for(self, path: str, process: subprocess.Popen):
        """The page of a server that is beginning."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with urllib.request.urlopen(f"http://localhost:{self.port}{path}", timeout=20) as page:
                    assert page.status == 200 and page.read()
                return
            except urllib.error.HTTPError:
                raise
            except OSError:
                assert process.poll() is None and time.monotonic() < end, self.printed.read_text()[-3000:]
                time.sleep(0.2)

    def stop(self):
        for process in self.servers:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.servers:
            process.wait(60)
        self.servers.clear()


@pytest.fixture
def terminal(tmp_path, programs, demo_output):
    for source in (ROOT / "examples", demo_output):
        leave_out = shutil.ignore_patterns("node_modules", "results", "__pycache__", "model")
        shutil.copytree(source, tmp_path / source.name, ignore=leave_out)
    (tmp_path / "book.txt").write_text("def main():\n    return 1\n" * 100)
    (tmp_path / "wikitext.yaml").write_text(TASK.format(folder=tmp_path))
    opened = Terminal(tmp_path, programs)
    yield opened
    opened.stop()


def commands(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_section_with_blocks_is_known():
    assert {name for name, text in SECTIONS.items() if BLOCK.search(text)} == PRINTED.keys()
    assert {language for language, _ in BLOCK.findall(TEXT)} == {"bash", "python"}


@pytest.mark.parametrize("section", PRINTED)
def test_a_section_runs(section, terminal):
    [(_, beginning)] = BLOCK.findall(HEAD)
    for number, (language, blocks) in enumerate(groupby(BLOCK.findall(SECTIONS[section]), lambda block: block[0])):
        text = "\n".join(block for _, block in blocks)
        if language == "python":
            own = "task_manager=lm_eval.tasks.TaskManager(include_path='.')"
            text = text.replace('tasks=["wikitext"]', f'tasks=["wikitext"], {own}')
            (terminal.folder / f"page{number}.py").write_text(beginning + terminal.here(text))
            terminal.type(f"python page{number}.py")
            continue
        for line in commands(text):
            if any(server.poll() is None for server in terminal.servers) and any(name in line for name in SERVERS):
                terminal.stop()
            terminal.type(line)
    printed = terminal.printed.read_text()
    assert all(some in printed for some in PRINTED[section]), printed[-3000:]
    assert "Traceback" not in printed, printed[-3000:]
    assert "torch.ao.quantization is deprecated" not in printed, printed[-3000:]
