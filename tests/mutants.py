"""Whether the tests would notice: small changes to the sources, one at a time, each of which some test should find.

    make mutants                                      # the whole sample, two hours on two cores; goes on where it was
    python tests/mutants.py --areas memory --limit 5  # a few
    python tests/mutants.py --again                   # those that survived, after the tests have changed
    python tests/mutants.py --table                   # the table of what is known, into CONTRIBUTING.md

cosmic-ray makes the changes. A seed chooses PER_AREA of them in each area, first the place, then the change, so that a
place with many possible changes counts no more than others. First every test runs once under coverage; a mutant then
runs the tests that reached its line, those of the area first and the quickest first, and then the others of its area,
until one fails. It has three times as long as these took, of the processor's time, since a change may also loop for
ever. Results are appended to build/mutants/results.jsonl. A survivor whose change nobody could see is entered in
equal_mutants.json with the reason.
"""

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import coverage
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "mutants"
RESULTS = BUILD / "results.jsonl"
EQUAL = ROOT / "tests" / "equal_mutants.json"
AREAS = {
    "attention": ["transfo_xl/attention_transfo_xl", "kernels/attention_cpu"],
    "memory": ["transfo_xl/memory_transfo_xl", "transfo_xl/cache_transfo_xl", "transfo_xl/masks_transfo_xl"],
    "adaptive": ["transfo_xl/adaptive_transfo_xl"],
    "layout": ["transfo_xl/layout_transfo_xl"],
    "streams": ["data/streams"],
    "checkpoints": ["training/checkpoints", "training/memory"],
    "evaluation": ["evaluation/language_model", "evaluation/reading"],
}
# The test files that are about an area, where none is called as it is.
ABOUT = {"layout": ("test_loading.py", "test_hub.py"), "evaluation": ("test_language_model.py",)}
PER_AREA = 30
SEED = 2019
WANTED, EQUAL_AT_MOST = 0.92, 0.03
MARKS = "not slow and not gpu"
# The kernels run in an interpreter of their own, and what is about pages and packages reaches no line in new ways.
LEFT_OUT = {"test_triton.py", "test_docs.py", "test_wheel.py", "test_walkthrough.py", "test_benchmarks.py"}


@dataclass(frozen=True)
class Mutant:
    """A changed source file: `changed` are the lines of the difference, `line` is the first of them."""

    area: str
    path: str
    line: int
    changed: str
    text: str

    @property
    def name(self) -> str:
        """The same as long as the lines are, wherever they stand."""
        return hashlib.sha1(f"{self.path}\n{self.changed}".encode()).hexdigest()[:12]


# ---- the sample ----


def sample(area: str) -> list[Mutant]:
    """PER_AREA mutants of an area. A place's turn depends on its line alone: when others change, most of them stay."""
    places = defaultdict(list)
    lines = {}
    for module in AREAS[area]:
        path = f"src/txl_hf/{module}.py"
        source = (ROOT / path).read_text(encoding="utf-8")
        lines[path] = source.splitlines()
        for place, operator, occurrence in possible(source):
            places[path, place].append((operator, occurrence))

    def chance(key: tuple[str, tuple[int, int]]) -> random.Random:
        path, (line, column) = key
        return random.Random(f"{SEED} {path} {column} {lines[path][line - 1]}")

    mutants: dict[str, Mutant] = {}
    for key in sorted(places, key=lambda key: (chance(key).random(), key)):
        if len(mutants) == PER_AREA:
            break
        path, place = key
        operator, occurrence = chance(key).choice(places[key])
        source = "\n".join(lines[path]) + "\n"
        try:
            text = mutate_code(source, operator, occurrence)
        except AttributeError:  # cosmic-ray cannot replace an exception whose name has a dot
            continue
        if text is not None and compiles(text):
            changed = [line for line in difflib.ndiff(source.splitlines(), text.splitlines()) if line[0] in "+-"]
            mutant = Mutant(area, path, place[0], "\n".join(changed), text)
            mutants[mutant.name] = mutant
    return list(mutants.values())


def possible(source: str) -> Iterator[tuple[tuple[int, int], object, int]]:
    """(line and column, operator, its occurrence) of every change, but to annotations, which nobody computes with."""
    tree, hints = get_ast(source), list(annotations(source))
    for name in sorted(operator_names()):
        # Variables are renamed by what is given, and there is nothing to give.
        if name.startswith("core/Variable"):
            continue
        operator = get_operator(name)()
        positions = (position for node in walk(tree) for position in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(first <= start < last for first, last in hints):
                yield start, operator, occurrence


def walk(node) -> Iterator:
    """Every node of a tree of parso, in the order of cosmic-ray's visitors."""
    yield node
    for child in getattr(node, "children", ()):
        yield from walk(child)


def annotations(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(ast.parse(source)):
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if hint is not None:
                yield (hint.lineno, hint.col_offset), (hint.end_lineno, hint.end_col_offset)


def compiles(text: str) -> bool:
    with warnings.catch_warnings(action="ignore"):
        try:
            compile(text, "mutant", "exec")
        except SyntaxError:
            return False
    return True


# ---- which tests reach which line ----


def copy_of_repository(folder: Path) -> Path:
    """Copy all files that git tracks or does not ignore, as they are now, into a folder that mutants may change."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def environment(folder: Path) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paths = [str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return given | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def pytest(*arguments: str) -> list[str]:
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", MARKS, *arguments]


def measure(folder: Path, files: list[str], workers: int) -> tuple[dict[str, dict[int, set[str]]], dict[str, float]]:
    """{file: {line: tests that reach it}}, and the seconds of each test, `tests/wing/test_x.py::test_y`.

    Args:
        files: paths below `tests`, no two with the same name.
    """
    (BUILD / "coverage").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda file: measure_file(folder, file), files))
    reached: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    seconds: dict[str, float] = defaultdict(float)
    for file in files:
        stem = BUILD / "coverage" / Path(file).stem
        broken = set()
        for case in ElementTree.parse(stem.with_suffix(".xml")).iter("testcase"):
            test = f"tests/{file}::{case.get('name', '').split('[')[0]}"
            seconds[test] += float(case.get("time", 0))
            if case.find("failure") is not None or case.find("error") is not None:
                broken.add(test)
        for test in broken:
            print(f"left out, since it fails without a mutant: {test}", flush=True)
            seconds.pop(test)
        data = coverage.CoverageData(str(stem))
        data.read()
        for path in data.measured_files():
            lines = reached[Path(path).relative_to(folder).as_posix()]
            for line, contexts in data.contexts_by_lineno(path).items():
                # A library may have functions called test_something too: those that pytest timed are tests.
                tests = {f"tests/{file}::{name.rsplit('.', 1)[-1]}" for name in contexts}
                lines[line] |= tests & seconds.keys()
    return reached, seconds


def measure_file(folder: Path, file: str):
    """Run a test file under coverage, unless that was done already with the same sources."""
    stem = BUILD / "coverage" / Path(file).stem
    settings = stem.with_suffix(".ini")
    settings.write_text(f"[run]\ndynamic_context = test_function\nsource = {folder}/src/txl_hf\n")
    run = ["-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={stem}"]
    stamp, digest = stem.with_suffix(".stamp"), digest_of(folder, file)
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"coverage of {file}", flush=True)
    command = [sys.executable, *run, *pytest(f"--junitxml={stem.with_suffix('.xml')}", f"tests/{file}")]
    process = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    if process.returncode not in (0, 1, 5):  # 1: some tests fail; 5: nothing to run under these marks
        sys.exit(f"error: {file} does not run without a mutant:\n{process.stdout[-3000:]}")
    stamp.write_text(digest)


def digest_of(folder: Path, file: str) -> str:
    """Of what a test file's coverage depends on: the sources, the file, and what test files share."""
    shared = [path for path in (folder / "tests").glob("*.py") if not path.name.startswith("test_")]
    paths = sorted([*(folder / "src").rglob("*.py"), *shared, folder / "tests" / file])
    return hashlib.sha1(b"".join(path.read_bytes() for path in paths)).hexdigest()


def tests_for(mutant: Mutant, lines: dict[int, set[str]], seconds: dict[str, float]) -> list[str]:
    """Those that reach the mutant's line, or where none is known to, its function or file; then those of its area."""
    found = lines.get(mutant.line, set())
    if not found:
        around = [
            node
            for node in ast.walk(ast.parse((ROOT / mutant.path).read_text(encoding="utf-8")))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and first_line(node) <= mutant.line <= node.end_lineno
        ]
        spans = [range(first_line(node), node.end_lineno + 1) for node in sorted(around, key=first_line, reverse=True)]
        for span in [*spans, range(1, 10**6)]:
            found = {test for line in span for test in lines.get(line, ())}
            # A body that no test reaches says that no test reaches the mutant: what else is near does not count.
            if found or (spans and span is spans[0] and mutant.line in lines and mutant.line != span.start):
                break
    # They may reach it where coverage does not see them: in a process of their own, or while torch compiles.
    about = {test for test in seconds if is_about(mutant.area, test)}
    return sorted(found | about, key=lambda test: (test not in found, test not in about, seconds[test], test))


def is_about(area: str, test: str) -> bool:
    return Path(test.partition("::")[0]).name in ABOUT.get(area, (f"test_{area}.py",))


def first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


# ---- running ----


def judge(mutant: Mutant, folder: Path, tests: list[str], seconds: dict[str, float]) -> dict:
    """Run the tests on the mutant until one fails; the result, as a row."""
    row = {name: value for name, value in asdict(mutant).items() if name != "text"} | {"name": mutant.name}
    if not tests:
        return row | {"result": "survived", "by": "no test reaches it", "seconds": 0.0}
    path = folder / mutant.path
    original = path.read_text(encoding="utf-8")
    limit = 60 + 3 * sum(seconds[test] for test in tests)
    begin = time.monotonic()
    try:
        path.write_text(mutant.text, encoding="utf-8")
        command = [sys.executable, *pytest("-x", "--no-header", *tests)]
        # The limit is of the processor's time, which other programs do not take away; waiting has one of its own.
        process = subprocess.run(
            command,
            cwd=folder,
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=20 * limit,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit))),
        )
        if "ERROR: not found:" in process.stdout + process.stderr:
            sys.exit(f"error: coverage names tests that pytest does not find:\n{process.stderr[-2000:]}")
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise subprocess.TimeoutExpired(command, limit)
        killed = process.returncode != 0
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", process.stdout, re.MULTILINE)
        result, by = ("killed", failed[0] if failed else "import") if killed else ("survived", f"{len(tests)} tests")
    except subprocess.TimeoutExpired:
        result, by = "timeout", f"{limit:.0f} s"
    finally:
        path.write_text(original, encoding="utf-8")
    return row | {"result": result, "by": by, "seconds": round(time.monotonic() - begin, 1)}


def known() -> dict[str, dict]:
    """The last result of each mutant."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def run(mutants: Iterable[Mutant], workers: int, files: list[str] | None):
    """Judge the mutants by the tests of all files or of these, and append each result as it comes."""
    BUILD.mkdir(parents=True, exist_ok=True)
    folders = [copy_of_repository(BUILD / f"worker{i}") for i in range(workers)]
    tests = folders[0] / "tests"
    everything = [path.relative_to(tests) for path in sorted(tests.rglob("test_*.py")) if path.name not in LEFT_OUT]
    everything = [path.as_posix() for path in everything if path.parts[0] != "clients"]
    reached, seconds = measure(folders[0], files or everything, workers)
    free, writing = list(folders), threading.Lock()

    def one(mutant: Mutant):
        with writing:
            folder = free.pop()
        row = judge(mutant, folder, tests_for(mutant, reached[mutant.path], seconds), seconds)
        with writing:
            free.append(folder)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['result']:9}{row['seconds']:7.1f} s  {mutant.path}:{mutant.line}  {row['by']}", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, mutants))


# ---- the table ----


def table(rows: dict[str, dict], equal: dict[str, str]) -> tuple[str, float, float]:
    """The figures of each area in Markdown, and the shares of all that are killed and called equal."""
    lines = [
        "| area | mutants | killed | equal | survived | killed of those that differ |",
        "|---|---|---|---|---|---|",
    ]
    total = [0, 0, 0]
    for area in AREAS:
        found = [rows[mutant.name] for mutant in sample(area) if mutant.name in rows]
        killed = sum(row["result"] != "survived" for row in found)
        same = sum(row["result"] == "survived" and row["name"] in equal for row in found)
        lines.append(figures(area, len(found), killed, same))
        total = [total[0] + len(found), total[1] + killed, total[2] + same]
    lines.append(figures("all", *total))
    count, killed, same = total
    return "\n".join(lines), killed / max(1, count - same), same / max(1, count)


def figures(area: str, count: int, killed: int, same: int) -> str:
    share = f"{killed / (count - same):.1%}" if count > same else ""
    return f"| {area} | {count} | {killed} | {same} | {count - killed - same} | {share} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--limit", type=int, help="at most so many mutants that have no result yet")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (%(default)s)")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="only these, by their path below tests")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument(
        "--table", action="store_true", help="write what is known into CONTRIBUTING.md, and run nothing"
    )
    arguments = parser.parse_args()
    equal = json.loads(EQUAL.read_text(encoding="utf-8"))
    if not arguments.table:
        rows = known()
        done = {
            name for name, row in rows.items() if not arguments.again or row["result"] != "survived" or name in equal
        }
        left = [mutant for area in arguments.areas for mutant in sample(area) if mutant.name not in done]
        run(left[: arguments.limit], arguments.workers, arguments.tests)
    rows = known()
    text, killed, same = table(rows, equal)
    print(text)
    for row in rows.values():
        if row["result"] == "survived" and row["name"] not in equal:
            print(f"\n{row['name']} {row['path']}:{row['line']} ({row['by']})\n{row['changed']}")
    if arguments.table:
        page = ROOT / "CONTRIBUTING.md"
        block = r"(?s)(<!-- mutants: written by tests/mutants\.py -->\n).*?(\n<!-- end of mutants -->)"
        page.write_text(re.sub(block, lambda found: found[1] + text + found[2], page.read_text()), encoding="utf-8")
    return int(killed < WANTED or same > EQUAL_AT_MOST)


if __name__ == "__main__":
    sys.exit(main())
