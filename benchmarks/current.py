"""Print which rows of a GPU measure today's code, so that `gpu_quarter.sh` leaves their steps out.

    python benchmarks/current.py             # one word a row, such as train-nvidia-base:ours-txl_triton-compile
    python benchmarks/current.py --all       # every row of a GPU, the oldest first, with what is current

A row names the commit that it measures. It is current while no file of what it measures has changed since. Without a
repository, or where the commit is unknown or ends in "-dirty" (the sources had changes beside it), no row is current.
"""

import argparse
import subprocess
from pathlib import Path
from typing import Any

import harness

ROOT = Path(__file__).parents[1]
# For each table: the column that names what a row measures, the sources of each task of a workload (the name's first
# word), and the sources of all its rows.
LAYERS = ("src/txl_hf/transfo_xl", "src/txl_hf/kernels")
MEASURED = {
    "model.csv": ("workload", {"train": ("src/txl_hf/training",), "evaluate": ("src/txl_hf/evaluation",)}, LAYERS),
    "attention_kernel.csv": ("shape", {}, ("src/txl_hf/kernels/attention_triton.py",)),
}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every row of a GPU, with its date and commit")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder of the tables (%(default)s)")
    arguments = parser.parse_args(given)
    rows = newest(arguments.results)
    if not arguments.all:
        print(*(name for name, row in rows.items() if row["current"]))
        return
    for name, row in sorted(rows.items(), key=lambda item: (item[1]["current"], item[1]["date"])):
        print(row["date"], row["commit"], "current" if row["current"] else "older", name)


def newest(results: Path) -> dict[str, dict[str, Any]]:
    """The newest row of each measurement of a GPU, by measurement and contender, and whether it is `current`."""
    found: dict[str, dict[str, Any]] = {}
    for table, (column, of_tasks, of_all) in MEASURED.items():
        for row in harness.read(results / table):
            if "NVIDIA" in row["processor"]:
                paths = (*of_all, *of_tasks.get(row[column].partition("-")[0], ()))
                found[f"{row[column]}:{row['contender']}"] = row | {"paths": paths}
    answers = {asked: is_unchanged(*asked) for asked in {(row["commit"], row["paths"]) for row in found.values()}}
    return {name: row | {"current": answers[row["commit"], row["paths"]]} for name, row in found.items()}


def is_unchanged(commit: str, paths: tuple[str, ...]) -> bool:
    """Whether the files are what they were at a commit."""
    command = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *paths]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    main()
