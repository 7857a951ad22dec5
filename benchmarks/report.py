"""Tables and plots from the CSV files in `results/`, and nothing else.

    python benchmarks/report.py                          # rewrite the tables of `PAGES`, and the plots
    python benchmarks/report.py --check                  # say whether the tables are those of the CSV files
    python benchmarks/report.py --add FOLDER             # append the rows that a run elsewhere has left in a folder
    python benchmarks/report.py --bars                   # which of the figures that are to be reached on a GPU are
    python benchmarks/report.py --compare OLD NEW        # two results folders: have ratios moved by more than 10 %?

A table stands between `<!-- NAME: … -->` and `<!-- end of NAME -->`. It shows the last run of each workload on each
machine; ratios are those taken in one run.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gpu_train
import harness

ROOT = Path(__file__).parents[1]
# The front page, the page that answers questions, the page with every machine, and the advice on settings.
PAGES = ("README.md", "benchmarks/README.md", "benchmarks/results/README.md", "docs/settings.md")
RUN = ("date", "commit")
MACHINE = ("processor", "threads", "dtype")
# File: what names a workload, what names a contender, and the ratio that should come out again.
KEYS = {
    "model.csv": ("workload", "contender", "times_legacy_p50"),
    "precision.csv": ("workload", "contender", None),
    "sliding_window.csv": ("model attention_length segment implementation same_length", "contender", "times_p50"),
    "softmax.csv": ("size", "contender", "times_legacy_p50"),
    "attention_kernel.csv": ("shape mode", "contender", "of_sdpa"),
    "growth.csv": ("model axis task", "length", None),
    "tokenizer.csv": ("text way", "peer_transformers", None),
    "threads.csv": ("model busy", "setting", None),
}
DRIFT = 0.1
TASKS = ("train", "evaluate", "decode")
# What the front page shows: of each task the shortest and the longest, the smallest and the largest vocabulary.
FRONT = (
    "train-enwik8",
    "train-wt103",
    "train-nvidia-base",
    "train-nvidia-large",
    "evaluate-enwik8-3800",
    "evaluate-wt103-640",
    "evaluate-nvidia-base-640-b16",
    "decode-enwik8-512",
    "decode-enwik8-2048",
    "decode-wt103-640-sampled",
)
# What the questions show beside it, and of which workloads the memory.
ANSWERS = (
    *FRONT,
    "train-enwik8-dropout",
    "decode-nvidia-base-640-b1",
    "decode-nvidia-base-640-b32",
)
WINDOWS = ("800", "3800")
MEMORY = ("train-enwik8", "evaluate-enwik8-3800", "decode-enwik8-2048")

Row = dict[str, str]
Runs = dict[str, dict[str, Row]]
Machines = dict[str, tuple[tuple, Runs]]
CALLED = {"gpt2": "GPT-2"}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true")
    action.add_argument("--bars", action="store_true")
    action.add_argument("--add", type=Path, metavar="FOLDER")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    arguments = parser.parse_args(given)
    if arguments.bars:
        return print_bars()
    if arguments.compare:
        return compare(*arguments.compare)
    if arguments.add:
        add(arguments.add)
    texts = {path: fill(path.read_text(encoding="utf-8")) for path in map(ROOT.joinpath, PAGES)}
    stale = [str(path.relative_to(ROOT)) for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    if arguments.check:
        if stale:
            print(f"not what the CSV files say: {', '.join(stale)}; run python benchmarks/report.py", file=sys.stderr)
        return int(bool(stale))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    plot_speed()
    plot_growth()
    print(f"tables changed in {', '.join(stale) or 'no file'}; plots in {harness.RESULTS.relative_to(ROOT)}/")
    return 0


def machine(row: Row) -> tuple[str, ...]:
    return tuple(row.get(column) or "" for column in MACHINE)


def latest(name: str, rows: list[Row] | None = None) -> dict[tuple, dict[str, Row]]:
    """{(machine, workload): {contender: row}} of the last run of each workload, in the order in which they first came.

    `rows` of the file `name`, or all that are committed.
    """
    _, contender, _ = KEYS[name]
    runs: dict[tuple, dict[str, Row]] = {}
    for row in harness.read(harness.RESULTS / name) if rows is None else rows:
        key = place_of(name, row)
        run = runs.get(key, {})
        started = next(iter(run.values()), row)
        # A contender comes once in a run; another date or commit is another run as well.
        if row[contender] in run or any(row.get(c) != started.get(c) for c in RUN):
            run = {}
        runs[key] = run | {row[contender]: row}
    return runs


def add(folder: Path) -> None:
    """Append the rows of a folder's files that are not there yet.

    Raises:
        SystemExit: there is none, or one that is older than the last run: tables show what comes last.
    """
    found = {}
    for name in (*KEYS, "attention_tiles.csv", "gpu_train.csv"):
        there = harness.read(harness.RESULTS / name)
        known, last = {measured(row) for row in there}, {}
        for row in there:
            last[place_of(name, row)] = max(row["date"], last.get(place_of(name, row), ""))
        new = [row for row in harness.read(folder / name) if measured(row) not in known]
        if old := [row for row in new if row["date"] < last.get(place_of(name, row), "")]:
            newer = last[place_of(name, old[0])]
            sys.exit(
                f"error: {folder / name} has a row of {old[0]['date']}, and here is one of {newer}: nothing added"
            )
        # Where the sources came without their repository, they are those here.
        found[name] = [row | {"commit": row["commit"] or harness.commit()} for row in new]
    if not any(found.values()):
        sys.exit(f"error: --add {folder} has no rows that are not here already")
    for name, rows in found.items():
        if rows:
            harness.append(harness.RESULTS / name, rows)
            print(f"{len(rows)} rows added to {name}")


def place_of(name: str, row: Row) -> tuple[tuple[str, ...], str]:
    """The machine and the workload of a row of the file `name`, of which a table shows the last run."""
    workload = KEYS[name][0].split() if name in KEYS else []
    return machine(row), " ".join(row.get(column) or "" for column in workload)


def measured(row: Row) -> frozenset[tuple[str, str]]:
    """Values of a row without its commit; empty ones are left out, because columns were added later."""
    return frozenset((column, value) for column, value in row.items() if value and column != "commit")


def compare(old: Path, new: Path) -> int:
    """Print how each ratio has moved; 1 if one did by more than `DRIFT`, or if nothing was measured.

    Where `new` is `old` with rows behind them, only these count: what was not measured again cannot have moved.
    """
    moved, seen, measured = 0, 0, 0
    for name, (_, _, ratio) in KEYS.items():
        if ratio is None:
            continue
        rows, found = harness.read(old / name), harness.read(new / name)
        if all(row.items() <= other.items() for row, other in zip(rows, found, strict=False)):
            found = found[len(rows) :]
        measured += len(found)
        before, after = latest(name, rows), latest(name, found)
        for key in before.keys() & after.keys():
            for contender in before[key].keys() & after[key].keys():
                ratios = [runs[key][contender].get(ratio) for runs in (before, after)]
                if contender == "legacy" or not all(ratios):
                    continue
                first, second = map(float, ratios)
                drift = second / first - 1
                seen += 1
                moved += abs(drift) > DRIFT
                mark = "  MOVED" if abs(drift) > DRIFT else ""
                print(f"{name:20} {key[1]:34} {contender:15} {first:9} → {second:9} {drift:+7.1%}{mark}")
    if not measured:
        print(f"error: {new} has no row that {old} has not", file=sys.stderr)
        return 1
    print(f"{moved} of {seen} ratios moved by more than {DRIFT:.0%}" if seen else "nothing to compare on this machine")
    return int(moved > 0)


# ---- bars -------------------------------------------------------------------------------------------------------

# NVIDIA's own inference (DeepLearningExamples, PyTorch, TorchScript in fp16) on one A100, in tokens a second.
INFERENCE = {
    "base-640-b1": 6_936,
    "base-640-b16": 90_768,
    "base-640-b32": 107_082,
    "large-1600-b1": 11_068,
    "large-1600-b16": 30_783,
    "large-1600-b32": 32_162,
}


@dataclass(frozen=True)
class Bar:
    """A figure to reach in a column of a file, by a row on a GPU that has all of `wanted`, each a value or several.

    Of the last runs of such rows the best one counts, or the worst where `all_of_them` have to reach it.
    """

    name: str
    file: str
    wanted: dict[str, str | tuple[str, ...]]
    column: str
    figure: float
    at_most: bool = False
    all_of_them: bool = False

    def allows(self, row: Row) -> bool:
        if self.file == "model.csv" and not is_offered(row["contender"]):
            return False
        values = {key: (value,) if isinstance(value, str) else value for key, value in self.wanted.items()}
        return "NVIDIA" in row["processor"] and all(row.get(key) in value for key, value in values.items())

    def found(self) -> Row | None:
        """The committed row that counts, if there is one."""
        rows = harness.read(harness.RESULTS / self.file)
        rows = [row for row in rows if self.allows(row) and row.get(self.column)]
        if self.file in KEYS:
            rows = [row for run in latest(self.file, rows).values() for row in run.values()]
        choose = max if self.at_most == self.all_of_them else min
        return choose(rows, key=lambda row: float(row[self.column])) if rows else None

    def is_met(self, value: float) -> bool:
        return harness.meets(value, self.figure) if self.at_most else value >= self.figure


# The figures are of half precision, and their training is by LAMB.
HALF = ("bf16", "fp16")
LAMB = {"dtype": HALF, "optimizer": "Lamb"}
# As the recipes have it.
BASE = LAMB | {"workload": "train-nvidia-base", "dropout": "0.1"}
LARGE = LAMB | {"workload": "train-nvidia-large", "dropout": "0.2", "dropatt": "0.2"}
SPEED = "tokens_per_second_p50"
# NVIDIA trains on eight A100; the paper's times of a sliding window are of Table 9.
BARS = [
    Bar("NVIDIA base, 8 A100", "model.csv", BASE, SPEED, 449_890),
    Bar("large on one GPU", "model.csv", LARGE, SPEED, 130_000),
    Bar("NVIDIA large, 8 A100", "model.csv", LARGE, SPEED, 191_148),
    *(
        Bar(f"NVIDIA {size}", "model.csv", {"workload": f"evaluate-nvidia-{size}", "dtype": HALF}, SPEED, least)
        for size, least in INFERENCE.items()
    ),
    *(
        Bar(
            f"of plain sdpa, {mode}",
            "attention_kernel.csv",
            {"mode": mode, "contender": "txl_triton", "dtype": HALF},
            "of_sdpa",
            least,
            all_of_them=True,
        )
        for mode, least in (("forward", 0.5), ("forward+backward", 0.35))
    ),
    *(
        Bar(
            f"the paper's at {length:,}",
            "sliding_window.csv",
            {"attention_length": str(length), "contender": "memory"},
            "times_p50",
            least,
        )
        for length, least in ((800, 363), (1800, 773), (2800, 1409), (3800, 1874))
    ),
    *(
        Bar(
            f"test {part.metric.replace('_', ' ')}, {part.recipe}",
            "gpu_train.csv",
            {"recipe": part.recipe},
            f"test_{part.metric}",
            part.published,
            at_most=True,
        )
        for part in gpu_train.PARTS
        if part.published is not None
    ),
]


def is_offered(contender: str) -> bool:
    """Whether it is ours in the type of its run, and what somebody would use: eager is what all must equal."""
    return contender.startswith("ours") and contender not in ("ours-eager", "ours-bf16", "ours-int8")


def print_bars() -> int:
    """Each bar as met, missed or not measured."""
    for bar in BARS:
        row = bar.found()
        if row is None:
            print(f"not measured  {bar.name:34} {bar.figure:>10,g}")
            continue
        value = float(row[bar.column])
        verdict = "met" if bar.is_met(value) else "missed"
        what = " ".join(filter(None, (row.get("contender"), row.get("shape"), row["date"])))
        print(f"{verdict:12}  {bar.name:34} {bar.figure:>10,g} {value:>12,g}  {what}")
    return 0


# ---- tables -----------------------------------------------------------------------------------------------------


def fill(text: str) -> str:
    """The text with each table between its markers."""

    def replace(match: re.Match) -> str:
        name = match[2]
        if name not in TABLES:
            raise SystemExit(f"error: no table is called {name!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[name]()}{match[3]}"

    return re.sub(r"(<!-- ([\w-]+): [^>]*-->)\n.*?(<!-- end of \2 -->)", replace, text, flags=re.DOTALL)


def markdown(headers: list[str], lines: list[list[str]]) -> str:
    """Empty without lines."""
    rows = [headers, ["---"] * len(headers), *lines] if lines else []
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def by_machine(name: str, table: Callable[[dict[str, dict[str, Row]]], str]) -> str:
    """One table for each machine, with what it is and when it was measured."""
    tables = ((where, runs, table(runs)) for where, runs in machines_of(name).items())
    parts = [f"\n{conditions(where, runs)}:\n\n{lines}" for where, runs, lines in tables if lines]
    return "".join(parts or ["\nNothing measured yet.\n"]) + "\n"


def machines_of(name: str, counts: Callable[[dict[str, Row]], bool] = bool) -> dict[tuple, dict[str, dict[str, Row]]]:
    """{machine: {workload: {contender: row}}} of the last runs that count, GPUs last, workloads in one order."""
    runs = {key: run for key, run in latest(name).items() if counts(run)}
    workloads = sorted(dict.fromkeys(workload for _, workload in runs), key=by_task)
    return {
        where: {workload: runs[where, workload] for workload in workloads if (where, workload) in runs}
        for where in sorted(dict.fromkeys(where for where, _ in runs), key=lambda where: "NVIDIA" in where[0])
    }


def by_task(workload: str) -> int:
    return next((place for place, task in enumerate(TASKS) if workload.startswith(f"{task}-")), 0)


def conditions(where: tuple, runs: dict[str, dict[str, Row]]) -> str:
    """Hardware, PyTorch versions and dates of a machine's runs."""
    rows = [row for run in runs.values() for row in run.values()]
    dates = sorted({row["date"] for row in rows})
    versions = sorted({row["torch"] for row in rows if row.get("torch")})
    processor, threads, dtype = where
    hardware = [processor, *([f"{threads} threads"] if threads else []), *([dtype] if dtype else [])]
    software = [f"torch {' and '.join(versions)}"] if versions else []
    return ", ".join([*hardware, *software, " to ".join(dict.fromkeys((dates[0], dates[-1])))])


def number(text: str | float | None) -> str:
    """Four digits at most, with commas."""
    if text in (None, ""):
        return ""
    value = float(text)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def times(text: str | float | None) -> str:
    return f"{float(text):.3g}×" if text else ""


def rate(row: Row | None) -> str:
    return number(row["tokens_per_second_p50"]) if row else ""


def ours_of(run: dict[str, Row]) -> Row:
    """The default, where it ran."""
    return run.get("ours") or fastest(run)


def named_rate(row: Row) -> str:
    """Its speed, and which of ours it is where that is not the default."""
    variant = row["contender"].removeprefix("ours").removeprefix("-")
    return f"{rate(row)} ({variant})" if variant else rate(row)


def fastest(run: dict[str, Row]) -> Row:
    """Of ours, the fastest that is offered: the default, or what its user would turn on."""
    ours = [row for name, row in run.items() if name.startswith("ours") and name != "ours-eager"]
    return max(ours or run.values(), key=lambda row: float(row["tokens_per_second_p50"]))


def what(row: Row) -> str:
    lengths = f"M = {int(row['memory']):,}" if row.get("memory") else ""
    if row.get("segment") and not row["workload"].startswith("decode"):
        lengths += f", L = {int(row['segment']):,}"
    if row.get("clamp"):
        lengths += f", clamped at {int(row['clamp']):,}"
    return f"{row['workload']} ({lengths}, B = {row['batch']})" if lengths else row["workload"]


def speed_table(runs: dict[str, dict[str, Row]]) -> str:
    lines = []
    for run in runs.values():
        ours = ours_of(run)
        best = fastest(run)
        fast = "" if best is ours else f"{rate(best)} ({best['contender']})"
        spread = f"{number(ours['tokens_per_second_p20'])} – {number(ours['tokens_per_second_p80'])}"
        memory = " / ".join(number(run[name].get("peak_mib")) for name in ("ours", "legacy") if name in run)
        lines.append(
            [what(ours), f"**{rate(ours)}**", spread, fast]
            + [rate(run.get(name)) for name in ("legacy", "gpt2", "floor")]
            + [f"**{times(ours['times_legacy_p50'])}**" if ours["times_legacy_p50"] else ""]
            + [number(ours.get("mfu")), memory.strip(" /"), ours.get("nll_difference") or ""]
        )
    headers = ["workload", "ours", "p20 – p80", "faster variant", "legacy", "GPT-2", "floor", "times legacy"]
    return markdown([*headers, "MFU", "peak MiB, ours / legacy", "NLL off eager"], lines)


def precision_table(runs: dict[str, dict[str, Row]]) -> str:
    """Speed of narrower types beside `ours` in the same run, and their error."""
    lines = []
    for run in runs.values():
        ours = run["ours"]
        for row in run.values():
            if row is not ours:
                ratio = float(row["tokens_per_second_p50"]) / float(ours["tokens_per_second_p50"])
                figures = [rate(ours), rate(row), f"**{ratio:.3g}×**", row["nll_difference"]]
                lines.append([what(ours), row["contender"].removeprefix("ours-"), *figures])
    return markdown(["workload", "type", "fp32, tokens/s", "tokens/s", "times fp32", "NLL off eager in fp32"], lines)


def decode_table(runs: dict[str, dict[str, Row]]) -> str:
    lines = []
    for run in runs.values():
        for row in run.values():
            if row.get("token_ms_p50"):
                columns = ("prefill_tokens_per_second", "first_token_ms", "token_ms_p50", "token_ms_p99")
                lines.append([what(row), row["contender"], *(number(row[column]) for column in columns)])
    headers = ["workload", "contender", "prefill, tokens/s", "first token, ms", "per token p50, ms", "p99, ms"]
    return markdown(headers, lines)


def sliding_window_table(runs: dict[str, dict[str, Row]]) -> str:
    lines = []
    for run in runs.values():
        row = run["memory"]
        passes = "" if row["segment"] == "128" else f", {int(row['segment']):,} at a time"
        passes += f", {row['implementation']}" if row.get("implementation") else ""
        lines.append(
            [
                row["model"] + passes,
                f"{int(row['attention_length']):,}",
                rate(row),
                rate(run["vanilla"]),
                rate(run["gpt2"]),
            ]
            + [f"**{number(row['times_p50'])}×**", f"{number(row['times_p20'])} – {number(row['times_p80'])}"]
            + [f"{number(row['paper'])}×", row["nll_difference"]]
        )
    headers = ["model", "attention length", "with memory, tokens/s", "sliding window", "GPT-2's", "times the faster"]
    return markdown([*headers, "p20 – p80", "paper", "NLL off eager"], lines)


def growth_table(runs: dict[str, dict[str, Row]]) -> str:
    lines = []
    for run in runs.values():
        rows = list(run.values())
        first, last = rows[0], rows[-1]
        lines.append(
            [first["model"], first["axis"], first["task"], f"{int(first['length']):,} … {int(last['length']):,}"]
            + [f"{1e3 * float(first['seconds_p50']):,.4g} … {1e3 * float(last['seconds_p50']):,.4g}"]
            + [f"{first['seconds_exponent_all']} / {first['seconds_exponent_last']}"]
            + [f"{number(first['peak_mib'])} … {number(last['peak_mib'])}"]
            + [f"{first['peak_mib_exponent_all']} / {first['peak_mib_exponent_last']}"]
        )
    headers = ["model", "what grows", "task", "length", "ms a step (a token, for text)", "exponent, all / last three"]
    return markdown([*headers, "peak MiB", "exponent, all / last three"], lines)


def attention_table(runs: dict[str, dict[str, Row]]) -> str:
    lines = [
        [
            f"{row['shape']} ({row['B']}, {row['H']}, {row['L']}, {row['m']}, {row['Dh']})",
            row["mode"],
            row["contender"],
        ]
        + [number(row["ms_p50"]), number(row["tflops"]), f"{float(row['of_sdpa']):.0%}", number(row["peak_mib"])]
        for run in runs.values()
        for row in run.values()
    ]
    headers = ["shape (B, H, L, m, Dh)", "mode", "contender", "ms", "TFLOP/s", "of SDPA's speed", "peak MiB"]
    return markdown(headers, lines)


def threads_table(runs: dict[str, dict[str, Row]]) -> str:
    lines = []
    for run in runs.values():
        first, *_ = rows = list(run.values())
        speeds = [f"{rate(row)} ({number(row['lowest'])} – {number(row['highest'])})" for row in rows]
        lines.append([first["model"], first["busy"], *speeds])
    # Every run has all settings, in one order.
    return markdown(["model", "programs beside", *next(iter(runs.values()))], lines)


def softmax_table(runs: dict[str, dict[str, Row]]) -> str:
    lines = [
        [row["size"], row["tokens"], row["contender"], number(row["ms_p50"]), times(row.get("times_legacy_p50"))]
        + [number(row["peak_mib"])]
        for run in runs.values()
        for row in run.values()
    ]
    return markdown(["size", "tokens", "contender", "ms", "times legacy", "peak MiB"], lines)


def tokenizer_table(runs: dict[str, dict[str, Row]]) -> str:
    lines = [
        [row["text"], row["way"], number(row["tokens"])]
        + [number(row["tokens_per_second"]), number(row["peer_tokens_per_second"]), f"**{times(row['times_peer'])}**"]
        for run in runs.values()
        for row in run.values()
    ]
    return markdown(["text", "as", "tokens", "tokens/s", "legacy", "times legacy"], lines)


def newest_machines(name: str, counts: Callable[[dict[str, Row]], bool] = bool) -> Machines:
    """The machine of each maker that was measured last, with its runs that count."""
    newest: dict[str, tuple[tuple, Runs]] = {}
    for where, runs in machines_of(name, counts).items():
        maker = where[0].split()[0].removesuffix("(R)")
        if maker not in newest or last_date(runs) >= last_date(newest[maker][1]):
            newest[maker] = where, runs
    return newest


def compared_machines() -> Machines:
    """Those of model.csv; on a CPU a run counts where legacy transformers took part."""
    return newest_machines("model.csv", lambda run: "legacy" in run or not ours_of(run).get("threads"))


def short_table() -> str:
    """For the front page: a column for the newest machine of each maker."""
    newest = compared_machines()
    if not newest:
        return "\nNothing measured yet.\n\n"
    lines = []
    for name in FRONT:
        found = [runs.get(name) for _, runs in newest.values()]
        if any(found):
            lines.append([next(what(ours_of(run)) for run in found if run), *map(beside_others, found)])
    return f"\n{markdown(['tokens per second', *(conditions(*each) for each in newest.values())], lines)}\n"


def machines_table() -> str:
    lines = [[maker, conditions(*each)] for maker, each in compared_machines().items()]
    return markdown(["name", "machine, precision, PyTorch, dates of the rows"], lines)


def on_each_machine(names: Iterable[str]) -> list[tuple[str, dict[str, Row]]]:
    """(maker, run) of these workloads on the newest machines."""
    machines = compared_machines().items()
    return [(maker, runs[name]) for name in names for maker, (_, runs) in machines if name in runs]


def others_in(found: list[tuple[str, dict[str, Row]]]) -> list[str]:
    return list(dict.fromkeys(name for _, run in found for name in run if not name.startswith("ours")))


def task_table(task: str) -> str:
    """Speed of ours and of others in the same run, for each workload of a task on the newest machines."""
    found = on_each_machine([name for name in ANSWERS if name.startswith(f"{task}-")])
    others, lines = others_in(found), []
    for maker, run in found:
        ours = ours_of(run) if "legacy" in run else fastest(run)
        ratios = [
            float(ours["tokens_per_second_p50"]) / float(run[name]["tokens_per_second_p50"]) if name in run else ""
            for name in others
            if name != "legacy"
        ]
        lines.append(
            [what(ours), maker, f"**{named_rate(ours)}**", *(rate(run.get(name)) for name in others)]
            + [times(ours["times_legacy_p50"]), *map(times, ratios)]
        )
    names = [CALLED.get(name, name) for name in others]
    ratios = [f"× {name}" for name in names]
    return markdown(["workload", "machine", "ours", *names, *ratios], lines)


def memory_table() -> str:
    """Peak memory of ours and of others in the same run."""
    found = on_each_machine(MEMORY)
    others = others_in(found)
    lines = [
        [what(ours), maker, number(ours["peak_mib"]), *(number(run.get(name, {}).get("peak_mib")) for name in others)]
        for maker, run in found
        for ours in [ours_of(run)]
    ]
    return markdown(["peak MiB", "machine", "ours", *(CALLED.get(name, name) for name in others)], lines)


def window_table() -> str:
    """The sliding window on the newest machines, segments of 128 tokens with the default attention."""
    lines = []
    for maker, (_, runs) in newest_machines("sliding_window.csv").items():
        for run in runs.values():
            row = run["memory"]
            if row["segment"] == "128" and not row.get("implementation") and row["attention_length"] in WINDOWS:
                ratios = [f"**{number(row['times_p50'])}×**", f"{number(row['paper'])}×"]
                lines.append([f"{int(row['attention_length']):,}", maker, rate(row), rate(run["vanilla"]), *ratios])
    headers = ["attention length", "machine", "with memory, tokens/s", "sliding window", "ratio", "paper's ratio"]
    return markdown(headers, sorted(lines, key=lambda line: int(line[0].replace(",", ""))))


def types_table() -> str:
    """Speed of each type beside fp32 in the same run: a column for each machine."""
    machines = machines_of("precision.csv")
    ratios: dict[tuple[str, str], dict[tuple, str]] = {}
    for where, runs in machines.items():
        for run in runs.values():
            for name, row in run.items():
                if name != "ours":
                    ratio = float(row["tokens_per_second_p50"]) / float(run["ours"]["tokens_per_second_p50"])
                    ratios.setdefault((what(row), name.removeprefix("ours-")), {})[where] = times(ratio)
    lines = [[*key, *(found.get(where, "") for where in machines)] for key, found in ratios.items()]
    return markdown(["workload", "type", *(where[0] for where in machines)], lines)


def tokenizers_table() -> str:
    """A whole file on every machine."""
    lines = [
        [row["processor"], row["threads"], number(row["tokens_per_second"]), number(row["peer_tokens_per_second"])]
        + [f"**{times(row['times_peer'])}**"]
        for run in latest("tokenizer.csv").values()
        for row in run.values()
        if row["way"] == "file"
    ]
    return markdown(["machine", "threads", "tokens/s", "legacy", "× legacy"], lines)


def segments_table() -> str:
    """Milliseconds a token and memory by the length of the segment, on the newest machine."""
    _, runs = next(iter(newest_machines("growth.csv").values()), ((), {}))
    tasks = [list(run.values()) for run in runs.values() if next(iter(run.values()))["axis"] == "segment"]
    lines = []
    for rows in zip(*tasks, strict=True):
        figures = [
            [f"{1e3 * float(row['seconds_p50']) / int(row['length']):.3f}", number(row["peak_mib"])] for row in rows
        ]
        lines.append([f"{int(rows[0]['length']):,}", *sum(figures, [])])
    headers = [f"{rows[0]['task']}, {unit}" for rows in tasks for unit in ("ms a token", "peak MiB")]
    return markdown(["segment", *headers], lines)


def backends_table() -> str:
    """Attention backends in the same run, on the newest machine of each maker where more than one ran."""
    names = {
        "ours": "auto",
        "ours-mems": "auto, with mems",
        "ours-eager": "eager, with mems",
        "ours-txl_triton": "txl_triton",
    }
    machines = newest_machines("model.csv", lambda run: len(run.keys() & names.keys()) > 1)
    lines = [
        [what(next(iter(run.values()))), where[0], *(rate(run.get(name)) for name in names)]
        for where, runs in machines.values()
        for name, run in runs.items()
        if name in FRONT or "ours-eager" not in run
    ]
    return markdown(["tokens per second", "machine", *names.values()], lines)


def batches_table() -> str:
    """Speed by the number of rows, where a workload was measured with several: the fastest of ours."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for where, runs in machines_of("model.csv").items():
        for name, run in runs.items():
            if batch := re.search(r"-b(\d+)$", name):
                found.setdefault((name[: batch.start()], where[0]), {})[batch[1]] = rate(fastest(run))
    found = {key: rates for key, rates in found.items() if len(rates) > 1}
    sizes = sorted({size for rates in found.values() for size in rates}, key=int)
    lines = [[*key, *(rates.get(size, "") for size in sizes)] for key, rates in found.items()]
    return markdown(["tokens per second", "machine", *(f"B = {size}" for size in sizes)], lines)


def bars_table() -> str:
    lines = []
    for bar in BARS:
        if row := bar.found():
            value = float(row[bar.column])
            verdict = "met" if bar.is_met(value) else "missed"
            lines.append([bar.name, f"{bar.figure:,g}", f"**{value:,g}**", verdict, row["date"]])
    return markdown(["figure", "to reach", "found", "", "date"], lines)


def last_date(runs: dict[str, dict[str, Row]]) -> str:
    return max(row["date"] for run in runs.values() for row in run.values())


def beside_others(run: dict[str, Row] | None) -> str:
    """Our speed, and how many times that of the others which ran."""
    if run is None:
        return ""
    ours = ours_of(run) if "legacy" in run else fastest(run)
    ratios = [f"{times(ours['times_legacy_p50'])} legacy"] if "legacy" in run else []
    if "gpt2" in run:
        ratio = float(ours["tokens_per_second_p50"]) / float(run["gpt2"]["tokens_per_second_p50"])
        ratios.append(f"{times(ratio)} GPT-2")
    return named_rate(ours) + (f" ({', '.join(ratios)})" if ratios else "")


TABLES: dict[str, Callable[[], str]] = {
    "speed-short": short_table,
    "speed": lambda: by_machine("model.csv", speed_table),
    "decode": lambda: by_machine("model.csv", decode_table),
    "precision": lambda: by_machine("precision.csv", precision_table),
    "sliding-window": lambda: by_machine("sliding_window.csv", sliding_window_table),
    "growth": lambda: by_machine("growth.csv", growth_table),
    "attention": lambda: by_machine("attention_kernel.csv", attention_table),
    "softmax": lambda: by_machine("softmax.csv", softmax_table),
    "tokenizer": lambda: by_machine("tokenizer.csv", tokenizer_table),
    "threads": lambda: by_machine("threads.csv", threads_table),
    "machines": machines_table,
    **{f"question-{task}": partial(task_table, task) for task in TASKS},
    "question-memory": memory_table,
    "question-window": window_table,
    "question-types": types_table,
    "question-tokenizer": tokenizers_table,
    "bars": bars_table,
    "settings-segment": segments_table,
    "settings-backend": backends_table,
    "settings-batch": batches_table,
}


# ---- plots ------------------------------------------------------------------------------------------------------


def plot_speed() -> None:
    """How many times legacy, for each workload on the newest CPU of each maker."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machines = newest_machines("model.csv", lambda run: "legacy" in run)
    colors = {"ours": "C0", "gpt2": "C1", "floor": "C2"}
    figure, axes = plt.subplots(
        1, len(machines), figsize=(10, 9), layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    names = list(dict.fromkeys(name for _, runs in machines.values() for name in runs))
    for panel, (maker, (_, runs)) in zip(axes.flat, machines.items(), strict=True):
        for name, run in runs.items():
            for offset, (contender, color) in enumerate(colors.items()):
                if contender in run:
                    ratio = float(run[contender]["times_legacy_p50"])
                    panel.barh(names.index(name) + 0.27 * offset, ratio, 0.27, color=color)
        panel.axvline(1, color="C7", linestyle="--")
        panel.set_title(f"{maker} CPU", fontsize=15)
        panel.set_xlabel("speed, times transformers 4.35.2", fontsize=14)
        panel.tick_params(labelsize=13)
        panel.set_ylim(-0.5, len(names))
    axes[0, 0].set_yticks([position + 0.27 for position in range(len(names))], names)
    axes[0, 0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    labels = ["txl_hf", "GPT-2 of the same size", "txl_hf with plain attention (floor)"]
    figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=14, frameon=False)
    save(figure, "speed.png")


def plot_growth() -> None:
    """Milliseconds of a step and its memory against the length of the memory, and of a token against the text."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 4.2), layout="constrained")
    panels = {("memory", "seconds_p50"): axes[0], ("memory", "peak_mib"): axes[1], ("text", "seconds_p50"): axes[2]}
    for _, runs in newest_machines("growth.csv").values():
        for run in runs.values():
            rows = list(run.values())
            for (axis, column), place in panels.items():
                if rows[0]["axis"] == axis:
                    lengths = [int(row["length"]) for row in rows]
                    factor = 1 if column == "peak_mib" else 1e3
                    place.plot(lengths, [factor * float(row[column]) for row in rows], "o-", label=rows[0]["task"])
    names = ("milliseconds a step", "peak MiB of a step", "milliseconds a token")
    for place, label, length in zip(
        axes, names, ("memory, tokens", "memory, tokens", "tokens read so far"), strict=True
    ):
        place.set_xlabel(length, fontsize=14)
        place.set_ylabel(label, fontsize=14)
        place.tick_params(labelsize=13)
        place.set_ylim(0, 1.1 * place.get_ylim()[1])
        place.xaxis.set_major_locator(plt.MaxNLocator(3))
        for axis in (place.xaxis, place.yaxis):
            if axis.get_view_interval()[1] > 1000:
                axis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:,.0f}"))
        if place is not axes[2]:
            place.legend(fontsize=13, loc="upper left")
    save(figure, "growth.png")


def save(figure, name: str) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(harness.RESULTS / name, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
