"""The pages of examples/results say what their rows say."""

import csv
import math
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "examples" / "results"
STUDIES = ("reading", "memory_length", "long_memory", "statistics", "parts", "schedules", "penn_scaled")
CHARACTERS = ("wikipedia-long", "warandpeace", "characters")
# What makes runs the same but for their seed.
KEYS = ("text", "contender", "kind", "reading", "model", "memory_length", "streams", "average", "epochs")


def figures_of(page: str) -> set[str]:
    """Figures with a comma or two and more digits behind the point: measured ones, not settings."""
    table = re.sub(r"```.*?```|\(`?[\w./-]+\)", "", page, flags=re.DOTALL)
    return set(re.findall(r"(?<![\d.,])\d+\.\d{2,3}(?![\d.%])", table)) - {"0.01", "0.02", "0.03", "0.001"}


def measured(page: str) -> set[str]:
    """The test loss of every row of the CSV files that a page links, as perplexity or bits, with means over seeds."""
    found, groups = set(), {}
    for path in re.findall(r"\]\((\w+/\w+\.csv)\)", page):
        with (RESULTS / path).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for column in ("test", "validation", "nll"):
                    if row.get(column):
                        nats, bits = float(row[column]), row["text"] in CHARACTERS
                        value = nats / math.log(2) if bits else math.exp(nats)
                        key = (path, column, bits, *(row.get(name) for name in KEYS))
                        groups.setdefault(key, []).append(value)
    for (_, _, bits, *_), values in groups.items():
        found |= {f"{value:.{3 if bits else 2}f}" for value in [*values, sum(values) / len(values)]}
    return found


@pytest.mark.parametrize("study", STUDIES)
def test_figures_of_a_study_are_those_of_its_rows(study):
    page = (RESULTS / f"{study}.md").read_text(encoding="utf-8")
    said = figures_of(page)
    assert len(said) > 5 and said - measured(page) == set()


def test_every_page_and_every_row_is_found_from_the_first_page():
    first = (RESULTS / "README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in first} == set()
    text = first + "".join((RESULTS / page).read_text(encoding="utf-8") for page in pages)
    linked = {Path(link).name for link in re.findall(r"\]\(([\w./-]+)\)", text)}
    files = {path for path in RESULTS.rglob("*") if path.is_file() and path.parent.name != "paper"}
    # A model is found by its card.
    assert {path.name for path in files} - linked - {"README.md", "config.json", "model.safetensors"} == set()
