"""The figures of the house: its size, the arrows between its wings, and what a forward enters.

    python tests/house.py          # the table, with the limits that tests/test_house.py holds, and the goals

A limit that is above its goal may only fall: lower it in the commit that gets below it.

Programs are folders of examples/ that pyproject.toml installs with the package, each as `txl_hf.<name>`. Their lines
are counted apart from the library's; every other figure covers both. They import any wing but `commands`, which alone
starts them, by name.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import torch

import txl_hf
from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

ROOT = Path(__file__).parents[1]
PACKAGE, CONVERSION = ROOT / "src" / "txl_hf", ROOT / "conversion"
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
# Folders of programs by the names of their packages; recipes have no Python.
PROGRAMS = {
    name.removeprefix("txl_hf."): ROOT / folder
    for name, folder in FOLDERS.items()
    if folder.startswith("examples/") and (ROOT / folder / "__init__.py").exists()
}
# From the lowest to the highest; those of one row do not import one another.
WINGS = [
    {"transfo_xl"},
    {"kernels", "legacy", "data"},
    {"evaluation"},
    {"conversion"},
    {"training", "integrations"},
    {"commands", *PROGRAMS},
]
# legacy is below data, and these modules of the top are flat.
FLAT = {
    "files": 0,
    "command_line": 0,
    "memories": 0,
    "conformer": 4,
    "lm_eval": 4,
    "trl": 4,
}
# (limit, goal). Of the goal of the library, 2,200 are for memory files, GPUs, Conformers and agents.
LIMITS = {
    "lines of the library": (19_700, 19_700),
    "lines of installed programs": (1_026, 1_100),
    "flat modules": (7, 12),
    "files of the Hub set": (13, 13),
    "lines of the Hub set": (5_193, 5_200),
    "functions of a forward": (57, 60),
    "modules of a forward": (8, 8),
    "lines of a forward": (914, 1_000),
    "lines of the longest module": (938, 1_050),
    "lines of the longest function": (57, 60),
    "private methods of others overridden": (14, 15),
    "assignments into other libraries": (0, 0),
    "docstrings that begin with What": (0, 5),
}


def library() -> list[Path]:
    """Every file of Python of the library and its converters."""
    return sorted([*PACKAGE.rglob("*.py"), *CONVERSION.glob("*.py")])


def programs() -> list[Path]:
    """Every file of Python of the programs."""
    return sorted(path for folder in PROGRAMS.values() for path in folder.glob("*.py"))


def sources() -> list[Path]:
    """Every file of Python that is installed."""
    return [*library(), *programs()]


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def figures() -> dict[str, int]:
    """Each figure of `LIMITS` as it is."""
    forward = entered_by_a_forward()
    hub_set = [*(PACKAGE / "transfo_xl").glob("*_transfo_xl*.py")]
    return {
        "lines of the library": sum(map(lines_of, library())),
        "lines of installed programs": sum(map(lines_of, programs())),
        "flat modules": len([*PACKAGE.glob("*.py")]),
        "files of the Hub set": len(hub_set),
        "lines of the Hub set": sum(map(lines_of, hub_set)),
        "functions of a forward": len(forward),
        "modules of a forward": len({code.co_filename for code in forward}),
        "lines of a forward": sum(len(inspect.getsourcelines(code)[0]) for code in forward),
        "lines of the longest module": max(lines_of(path) for path in sources() if "triton" not in path.name),
        "lines of the longest function": max(length for length, _ in functions()),
        "private methods of others overridden": len(private_overrides()),
        "assignments into other libraries": len(assignments_into_others()),
        "docstrings that begin with What": len(riddles()),
    }


def functions() -> Iterator[tuple[int, str]]:
    """(lines without the docstring, name) of every function but those of kernels."""
    for path in sources():
        if "triton" in path.name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                documented = ast.get_docstring(node) is not None
                start = node.body[0].end_lineno if documented else node.lineno
                yield node.end_lineno - start, f"{path.relative_to(ROOT)}: {node.name}"


def wing_of(path: Path) -> str:
    beside = {CONVERSION: "conversion", **{folder: name for name, folder in PROGRAMS.items()}}
    if path.parent in beside:
        return beside[path.parent]
    return path.stem if path.parent == PACKAGE else path.parent.name


def floor_of(wing: str) -> int:
    if wing in FLAT:
        return FLAT[wing]
    return next(number for number, row in enumerate(WINGS) if wing in row)


def arrows_up() -> list[str]:
    """Imports of a wing that is above or beside the importing one."""
    found = []
    for path in sources():
        if path == PACKAGE / "__init__.py":
            continue
        here = wing_of(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported_wings(node, path):
                beside = floor_of(name) == floor_of(here) and name not in FLAT and here not in FLAT
                allowed = (here, name) in {("data", "legacy")}
                if name != here and not allowed and (floor_of(name) > floor_of(here) or beside):
                    found.append(f"{path.relative_to(ROOT)} imports {name}")
    return found


def imported_wings(node: ast.AST, path: Path) -> Iterator[str]:
    if not isinstance(node, ast.ImportFrom):
        return
    module = node.module or ""
    if node.level == 2 and path.parent.parent == PACKAGE:
        names = [module.split(".")[0]] if module else [alias.name for alias in node.names]
    elif node.level == 1 and path.parent == PACKAGE:
        names = [module.split(".")[0]] if module else [alias.name for alias in node.names]
    elif module.startswith("txl_hf."):
        names = [module.split(".")[1]]
    elif module == "txl_hf":
        names = [alias.name for alias in node.names]
    else:
        return
    known = {*FLAT, *(wing for row in WINGS for wing in row)}
    yield from (name for name in names if name in known)


def modules() -> Iterator:
    """Every module of the package that can be imported here."""
    names = [found.name for found in pkgutil.walk_packages(txl_hf.__path__, "txl_hf.")]
    # Not below `txl_hf.__path__` in an editable install.
    for program, folder in PROGRAMS.items():
        names += [found.name for found in pkgutil.iter_modules([str(folder)], f"txl_hf.{program}.")]
    for name in dict.fromkeys(names):
        if name.startswith("txl_hf.recipes"):
            continue
        try:
            yield importlib.import_module(name)
        except (ImportError, SystemExit):
            # A client that is not installed.
            continue


def private_overrides() -> list[str]:
    """Private methods of transformers' and tokenizers' classes, and other clients', that classes of ours replace."""
    found = set()
    for module in modules():
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if not kind.__module__.startswith("txl_hf."):
                continue
            for name in vars(kind):
                if not name.startswith("_") or name.startswith("__") or not inspect.isroutine(getattr(kind, name)):
                    continue
                bases = [base for base in kind.__mro__[1:] if name in vars(base)]
                if any(base.__module__.split(".")[0] in ("transformers", "tokenizers", "trl") for base in bases):
                    found.add(f"{kind.__module__}.{kind.__name__}.{name}")
    return sorted(found)


def assignments_into_others() -> list[str]:
    """Places that assign to an attribute of what was imported from another library, or set one by `setattr`."""
    found = []
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        foreign = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("txl_hf"):
                foreign |= {alias.asname or alias.name for alias in node.names}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                targets = [ast.Attribute(node.args[0], "")]
            elif not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                continue
            for target in targets:
                root = target
                while isinstance(root, ast.Attribute | ast.Subscript):
                    root = root.value
                attribute = isinstance(target, ast.Attribute) or (
                    isinstance(target, ast.Subscript) and isinstance(target.value, ast.Attribute)
                )
                if attribute and isinstance(root, ast.Name) and root.id in foreign - {"os", "sys"}:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def riddles() -> list[str]:
    """Docstrings, of any folder, that begin with "What" where they should name the thing."""
    found = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for folder in ("src", "conversion", "examples", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
            docs = [ast.get_docstring(node) or "" for node in nodes]
            found += [f"{path.relative_to(ROOT)}: {text.splitlines()[0]}" for text in docs if text.startswith("What ")]
    return found


def entered_by_a_forward() -> set[CodeType]:
    """The functions of the package that a segment with memory, cutoffs and a loss enters under eager attention."""
    sizes = {"d_model": 32, "d_embed": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "n_layer": 3, "mem_len": 8}
    model = TransfoXLForCausalLM(TransfoXLConfig(vocab_size=60, cutoffs=[20, 40], div_val=2, dropout=0.0, **sizes))
    model.eval().set_attn_implementation("eager")
    ids = torch.randint(60, (2, 8))
    mems = model(ids).mems
    entered = set()

    def trace(frame, event, argument):
        if frame.f_code.co_filename.startswith(str(PACKAGE)) and "<" not in frame.f_code.co_name:
            entered.add(frame.f_code)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        model(ids, mems=mems, labels=ids, output_logits=False)
    finally:
        sys.settrace(before)
    return entered


def table() -> str:
    rows = [f"| {name} | {value} | {LIMITS[name][0]} | {LIMITS[name][1]} |" for name, value in figures().items()]
    return "\n".join(["| figure | now | limit | goal |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
    for length, name in sorted(functions(), reverse=True)[:10]:
        print(length, name)
    print(*private_overrides(), *arrows_up(), *assignments_into_others(), *riddles(), sep="\n")
    for code in sorted(entered_by_a_forward(), key=lambda code: (code.co_filename, code.co_firstlineno)):
        print(Path(code.co_filename).stem, code.co_qualname)
