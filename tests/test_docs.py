"""Every Python block of the README and of docs/ runs, and every name, link and command on them leads somewhere.

The shell commands are run by test_walkthrough.py, those of conversion by test_conversion.py.
"""

import ast
import csv
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import house
import txl_hf
from hub_published import USER, hub_with, write_published
from scripts import run_script

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "txl_hf"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
FOLDERS = ("src", "conversion", "tests", "examples", "benchmarks")
SOURCES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The site has them too.
OTHERS = [
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md")),
    *(ROOT / "benchmarks" / "results").glob("*.md"),
    *sorted((ROOT / "examples" / "results").rglob("*.md")),
]
NOTEBOOKS = ROOT / "examples" / "notebooks"
# Lines of a page, at most, and KB.
LENGTHS = {
    "benchmarks/README.md": (200, 16),
    "CHANGELOG.md": (200, 16),
    "examples/README.md": (150, 11),
    "CONTRIBUTING.md": (140, 13),
}
LENGTHS |= {f"examples/results/{name}.md": (50, 5) for name in ("README", "reading", "memory_length", "parts")}
LENGTHS |= {f"examples/results/{name}.md": (50, 5) for name in ("statistics", "schedules", "long_memory")}
LENGTHS |= {"examples/results/penn_scaled.md": (50, 5)}

# Each page by itself, in a folder of its own; imports are paid for once. A block of text behind a block of Python is
# its output, which is compared, or written with TXL_WRITE_OUTPUTS=1 in the environment.
RUNNER = """
import contextlib, io, os, re, sys
from pathlib import Path

BLOCK = re.compile(r"^```python\\n(.*?)^```\\n(?:\\n```text\\n(.*?)^```\\n)?", re.DOTALL | re.MULTILINE)


def run(block):
    before = block.string[: block.start(1)].count("\\n")  # So that an error names the line of the page.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile("\\n" * before + block[1], str(page), "exec"), names)
    if block[2] is None:
        return block[0]
    if not os.environ.get("TXL_WRITE_OUTPUTS"):
        assert printed.getvalue() == block[2], f"{page}, line {before}: prints {printed.getvalue()!r}"
    return f"```python\\n{block[1]}```\\n\\n```text\\n{printed.getvalue()}```\\n"


for page in map(Path, sys.argv[1:]):
    folder, names = Path(page.stem), {"__name__": "__main__"}
    folder.mkdir()
    os.symlink(page.parents[1] / "examples", folder / "examples")
    os.chdir(folder)
    print("page", page.name, flush=True)
    text = page.read_text(encoding="utf-8")
    if (found := BLOCK.sub(run, text)) != text:
        page.write_text(found, encoding="utf-8")
    os.chdir("..")
"""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The sections of the page of other programs, each behind its heading.
CLIENTS = re.split(r"^## (.*)\n", (ROOT / "docs" / "clients.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
# What brings a module, where that is not called like it.
BROUGHT_BY = {
    "optimum": "optimum-quanto",
    **dict.fromkeys(("gymnasium", "sb3_contrib", "stable_baselines3"), "sb3-contrib"),
    "tensordict": "torchrl",
}
# What some words in Python need beside what brings them, and what our commands do nothing without.
NEEDED_BY = {
    **dict.fromkeys(("Trainer", "TrainingArguments", "TransfoXLTrainer", "device_map"), "accelerate"),
    "BitsAndBytesConfig": "bitsandbytes",
    "TorchAoConfig": "torchao",
}
COMMANDS = {"txl-export": "onnxscript", "txl-prepare": "datasets", "txl-serve": "uvicorn", "txl_hf.lm_eval": "lm_eval"}
# What is there without pip, or with what the package needs.
PROGRAMS = {"cd", "curl", "npm", "python", "transformers"}


def name_of_page(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def as_page(notebook: Path, folder: Path) -> Path:
    """The cells of a notebook as the blocks of a page, for the runner of the pages."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    page = folder / f"{notebook.stem}.md"
    page.write_text("".join(f"```python\n{block}\n```\n" for block in code), encoding="utf-8")
    return page


def test_every_python_block_and_notebook_runs(tmp_path):
    # The blocks of docs/clients.md need other programs: tests/clients runs them.
    pages = [page for page in PAGES if blocks(page) and page.stem != "clients"]
    named = "README agents coming-from conformer guide memory music settings training"
    assert {page.stem for page in pages} == set(named.split())
    (tmp_path / "notebooks").mkdir()
    notebooks = [as_page(path, tmp_path / "notebooks") for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    assert [page.stem for page in notebooks] == ["convert", "fine_tune", "generate"]
    (tmp_path / "runner.py").write_text(RUNNER)
    with hub_with(write_published(tmp_path / "published")) as hub:
        user = hub.environment(USER) | {"HF_HOME": str(tmp_path / "home")}
        command = [tmp_path / "runner.py", *pages, *notebooks]
        run = run_script(*command, cwd=tmp_path, timeout=300, only_torch=True, **user)
        assert run.returncode == 0, run.stdout[-500:] + run.stderr[-3000:]
        files = hub.repos["user/name"].files()
    assert {"README.md", "config.json", "model.safetensors", "modeling_transfo_xl.py", "tokenizer.json"} <= set(files)


def test_readme_and_guide_begin_without_a_download(tmp_path):
    """Their first blocks run without a network in an empty home, and show what they print."""
    firsts = [tmp_path / "pages" / page.name for page in (ROOT / "README.md", ROOT / "docs" / "guide.md")]
    (tmp_path / "pages").mkdir()
    for page in firsts:
        text = next(path for path in PAGES if path.name == page.name).read_text(encoding="utf-8")
        block = re.search(r"^```python\n.*?^```\n\n```text\n.*?^```\n", text, re.DOTALL | re.MULTILINE)
        assert block is not None and block.start() == text.index("```python\n"), page.name
        page.write_text(block[0], encoding="utf-8")
    (tmp_path / "runner.py").write_text(RUNNER)
    offline = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    run = run_script(tmp_path / "runner.py", *firsts, cwd=tmp_path, timeout=300, only_torch=True, **offline)
    assert run.returncode == 0, run.stderr[-3000:]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_readme_names_the_versions_of_the_last_run_of_the_whole_suite():
    with (ROOT / "tests" / "runs.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["tests"] == "make test" and row["failed"] == "0"]
    last = max(rows, key=lambda row: row["date"])
    versions = [".".join(last[name].split(".")[:2]) for name in ("python", "torch", "transformers")]
    said = "the whole suite last ran with Python {}, torch {} and transformers {} ({},".format(*versions, last["date"])
    assert said in (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of_page)
def test_pages_name_tests_and_files_that_exist(page):
    """A file of Python is named by its path or the end of it."""
    text = page.read_text(encoding="utf-8")
    named, links = re.findall(r"`([\w./-]+\.py)`", text), re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in SOURCES)} == set()
    assert [path for path in (page.parent / link for link in set(links)) if not path.exists()] == []


def test_contributing_names_functions_where_they_are():
    """A name in the table of changes, and the file behind it: `name` in `file.py`, or `name` of `file.py`."""
    named = re.findall(r"`(\w+)` (?:in|of) `([\w/]+\.py)`", CONTRIBUTING.read_text(encoding="utf-8"))
    assert len(named) >= 9
    for name, file in named:
        paths = [ROOT / path for path in SOURCES if f"/{path}".endswith(f"/{file}")]
        assert any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in paths), (name, file)


@pytest.mark.parametrize("page", LENGTHS)
def test_pages_are_short(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    lines, kilobytes = LENGTHS[page]
    assert len(text.splitlines()) <= lines and len(text.encode()) <= 1024 * kilobytes


# Written by examples/paper/page.py, with the commits of its runs.
@pytest.mark.parametrize("page", [*PAGES, *(page for page in OTHERS if page.parent.name != "paper")], ids=name_of_page)
def test_pages_name_no_commit_and_nothing_outside_of_the_repository(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"\b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7}\b|\.\./shared|\blent\b|machine goes back", text) == []


def test_the_page_of_commands_has_them_all():
    """test_walkthrough.py compares the options that it shows with `--help`; the site shows all of `--help`."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(txl-\w+)` \|", text, re.MULTILINE)) == set(PROJECT["scripts"])
    assert set(re.findall(r"^(txl-\w+) ", text, re.MULTILINE)) == set(PROJECT["scripts"])


def test_the_page_of_the_environment_has_every_variable_of_ours():
    sources = [*map(ROOT.joinpath, SOURCES), ROOT / "Makefile"]
    named = re.findall(r"\bTXL_[A-Z_]+", "".join(path.read_text(encoding="utf-8") for path in sources))
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert set(named) == set(re.findall(r"`(TXL_[A-Z_]+)", page))


def messages() -> Iterator[str]:
    """Every string in the package, with `…` for what it is formatted with."""
    for path in house.sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_errors_on_the_page_of_troubles_are_those_of_the_package():
    rows = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("| observation |")[0]
    shown = re.findall(r"^\| `(.*?)` \|", rows, re.MULTILINE)
    known = set(messages())
    assert len(shown) > 10
    # A part that is left out stands at an end.
    assert [text for text in shown if not any(text.strip("… ") in message for message in known)] == []


def test_no_two_trainings_of_a_page_share_a_folder():
    """Whoever tries one section after the other would mix them."""
    named = {}
    for page in PAGES:
        named[page.stem] = re.findall(r'(?:Arguments|Config)\(\s*"([^"]+)"', page.read_text(encoding="utf-8"))
        assert len(named[page.stem]) == len(set(named[page.stem])), page
    assert {"flattened", "tuned", "preferred", "rewarded"} == set(named["clients"])


def test_every_public_name_has_a_place_in_the_reference():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    assert set(re.findall(r"^::: txl_hf\.(\w+)$", text, re.MULTILINE)) == set(txl_hf.__all__)


def test_quirks_that_are_named_are_in_the_list():
    numbers = set(re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "quirks.md").read_text(), re.MULTILINE))
    sources = [path for folder in ("src", "conversion", "tests") for path in (ROOT / folder).rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    named = re.findall(r"[Qq]uirks? (\d+)(?: and (\d+))?", text)
    assert len(named) > 10 and {number for pair in named for number in pair if number} <= numbers


def test_contributing_names_every_wing_and_every_file_of_the_hub_set():
    text = CONTRIBUTING.read_text(encoding="utf-8")
    sources = [*PACKAGE.glob("[!_]*"), *(PACKAGE / "transfo_xl").glob("[!_]*.py")]
    names = {path.name + "/" * path.is_dir() for path in sources if path.suffix == ".py" or path.is_dir()}
    assert {name for name in names if f"`{name}`" not in text} == set()


def overridden() -> dict[str, set[str]]:
    """Private methods of transformers that classes of each file override, where what a file imports is at hand."""
    found: dict[str, set[str]] = {}
    for module in house.modules():
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != module.__name__:
                continue
            for name, value in vars(kind).items():
                theirs = any(
                    name in vars(base) and base.__module__.startswith("transformers.") for base in kind.__mro__
                )
                if theirs and re.match("_[a-z]", name) and callable(getattr(value, "__func__", value)):
                    found.setdefault(f"{module.__name__.rpartition('.')[2]}.py", set()).add(name)
    return found


def test_contributing_lists_the_private_methods_of_transformers_that_ours_override():
    text = CONTRIBUTING.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.py)` \| (`_.*) \|$", text, re.MULTILINE)
    listed = {name: set(re.findall(r"`(\w+)`", methods)) for name, methods in rows}
    assert listed == overridden()
    assert f"that ours override, {sum(map(len, listed.values()))}, " in text


def test_pages_name_extras_that_exist():
    named = re.findall(r"install \"\.\[([\w,-]+)\]\"", "".join(page.read_text() for page in PAGES))
    named = set(",".join(named).split(","))
    assert {"train", "serve", "lm-eval"} <= named <= PROJECT["optional-dependencies"].keys()


def distribution(requirement: str) -> str:
    """Its name and extras, without version."""
    return re.match(r"[\w.-]+(\[[\w,-]+\])?", requirement)[0].lower().replace("_", "-")


def installed_by(arguments: str) -> set[str]:
    """The distributions that `pip install` and these arguments name, with those of the package and of its extras."""
    found, waiting = set(), shlex.split(arguments)
    while waiting:
        name = distribution(waiting.pop().replace(".[", "txl-hf["))
        if not name.startswith("txl-hf"):
            found.add(name)
        for extra in re.findall(r"[\w-]+", name.removeprefix("txl-hf")) if name.startswith("txl-hf[") else ():
            waiting += PROJECT["optional-dependencies"][extra]
    return found


def modules_of(code: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names} - {"txl_hf"} - sys.stdlib_module_names


def needed_by_command(words: list[str]) -> set[str]:
    """The modules that a command of the shell imports."""
    assert words[0] in PROGRAMS | COMMANDS.keys(), words
    if words[0] == "python":
        words = words[1:] if words[1] != "-m" else words[2:]
    if words[0].endswith(".py"):
        return modules_of((ROOT / words[0]).read_text(encoding="utf-8"))
    return {COMMANDS[words[0]]} if words[0] in COMMANDS else set()


@pytest.mark.parametrize("section", CLIENTS[1::2])
def test_a_section_names_all_that_its_blocks_need(section):
    """With what the package itself brings, so that whoever types them in an empty environment gets to their end."""
    text = CLIENTS[CLIENTS.index(section) + 1]
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", CLIENTS[0] + text, re.DOTALL | re.MULTILINE))
    needed = modules_of(code) | {NEEDED_BY[word] for word in set(re.findall(r"\w+", code)) & NEEDED_BY.keys()}
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for command in re.split(r"\n|&&", block.replace("\\\n", " ").strip()):
            needed |= needed_by_command(shlex.split(command))
    there = {distribution(requirement) for requirement in PROJECT["dependencies"]}
    for arguments in re.findall(r"`pip install ([^`]+)`", text):
        there |= installed_by(arguments)
    brought = {name: {distribution(name), distribution(BROUGHT_BY.get(name, name))} for name in needed}
    assert {name for name, by in brought.items() if not by & there} == set()


def test_versions_of_clients_are_those_that_are_tried():
    pins = re.findall(r"==(\S+)", (ROOT / "tests" / "clients" / "requirements.txt").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| (?!client|---)[^|]+\|([^|]*)\|", CLIENTS[0], re.MULTILINE)
    named = set(re.findall(r"\d[\w.]+", " ".join(rows)))
    assert len(rows) > 15 and named - set(pins) == set()


def test_pages_name_make_targets_that_exist():
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make (\w[\w-]*)", "".join(page.read_text() for page in PAGES), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
