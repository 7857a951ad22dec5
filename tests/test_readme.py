"""Every Python block of the README runs, in its order, in a folder where the demo has run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from hub_server import HubServer

ROOT = Path(__file__).parents[1]


def test_readme(tmp_path):
    demo = [sys.executable, str(ROOT / "examples/demo.py"), "--steps", "4", "--layers", "1", "--width", "32"]
    text = tmp_path / "text.txt"
    text.write_text("import os\nimport sys\n\n\nclass Parser:\n    def parse(self, argv):\n        return 0\n" * 900)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home")}
    run = subprocess.run(
        [*demo, "--text", str(text)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 8
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    with HubServer({"hf_token_of_user": "user"}) as hub:
        environment |= hub.environment("hf_token_of_user")
        run = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        files = hub.repos["user/name"].files()
    assert {"README.md", "config.json", "model.safetensors", "modeling_transfo_xl.py", "tokenizer.json"} <= set(files)


def test_readme_names_tests_and_files_that_exist():
    text = (ROOT / "README.md").read_text()
    tests, links = re.findall(r"`(test_\w+\.py)`", text), re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert len(tests) >= 8 and len(links) >= 4
    missing = [path for path in [*(ROOT / "tests" / name for name in tests), *(ROOT / link for link in links)]
               if not path.exists()]  # fmt: skip
    assert not missing


def test_readme_names_make_targets_that_exist():
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make (\w[\w-]*)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named and named <= targets
