"""Write the page of the paper's experiments from the results: every figure on it comes from a committed file.

    python examples/paper/page.py

The page is `README.md` in `examples/results/paper`, and `paper` on the documentation's site.
"""

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ablation
import attention_maps
import context_length
import harness
from contenders import ROWS
from miniature import ROOT, SHUFFLED, results_folder
from txl_hf.command_line import CommandParser, one_line_errors
from txl_hf.files import write_text

RECIPES = ROOT / "examples" / "recipes"
INTRODUCTION = """\
# The paper's experiments

Each table and figure of [Transformer-XL](https://arxiv.org/abs/1901.02860) is one command. `make paper` runs them all
as a miniature on two CPU cores; **`make paper` again goes on where it was stopped**. The miniature has {layers} layers
of {width}, {parameters:.2f} million parameters, segments and a memory of {segment} words, and a vocabulary of
{vocabulary:,} words; it is post-norm, as the paper's models. It trains for {steps:,} steps of {streams} × {segment}
words of {text}, every row at one learning rate, {learning_rate}, which was tuned for none. The paper's models in
Table 6 have 128 million parameters, {larger:.0f} times as many, and the [recipe](#on-a-gpu) of that size trains on
{longer:,.0f} times as many words. So compare perplexities here with one another only. Without the articles of
[wikipedia-long](../README.md), `make paper` takes WikiText-103 from the Hub, or without a network the source of
Python's standard library, and writes all of this to `build/paper/results`.

| in the paper | command | here |
|---|---|---|
"""
CONTENTS = [
    (
        "Tables 6 and 10, Figure 4b: recurrence × encoding × loss",
        "examples/paper/ablation.py",
        "[ablation](#ablation)",
    ),
    ("Table 7: where no dependency is long", "examples/paper/ablation.py --shuffled", "[control](#control)"),
    ("Table 8: effective context length", "examples/paper/context_length.py", "[context](#context)"),
    ("Figures 5 and 7: where the heads look", "examples/paper/attention_maps.py", "[attention](#attention)"),
    ("Appendix E: generated articles", "examples/paper/article.py", "[articles](#articles)"),
    ("Table 9: evaluation speed", "benchmarks/sliding_window.py", "[benchmarks](../../../benchmarks/README.md)"),
    ("Tables 1 to 4: published checkpoints", "examples/paper/published.py NAME", "[below](#published-checkpoints)"),
    ("Tables 1 to 5: training", "examples/train_lm.py RECIPE", "[examples](../../README.md)"),
]
ABLATION = """\
## Ablation

A row's name says whether there is recurrence, whose encoding, and the loss. Equal steps on the same text in the same
order: a row with half losses learns from half as many targets, and one with longer segments from more. Rows named
`-longer` and `-shorter` have other steps, and the targets of the rows that they are compared with.

Attention length n is, with recurrence, a memory of n words that each query sees exactly; without, a window of n words
of which the last quarter is scored, after ¾ n to n words (`quarter` in the column `window` of [rows.csv](rows.csv);
`exact` scores the last word alone). `init` is the perplexity at the attention length of training, {segment}; `best` is
the lowest over the lengths, `at` the shortest where it is reached, and `beyond` the gain beyond the length of training
with the number of seeds that have one. These are of the first {characters:,} characters of the validation text, less
the first {longest} words of each of {evaluation_streams} streams, the same for all lengths; `test` is the perplexity
of as much of the test text at the length of `best`. After ± is half of what lies between the lowest and the highest
seed. Rows named `-176` and `-172` have no `init`, here as in the paper: no length that is scored is that of their
segments. The last column has the paper's init / best @ attention length, of far larger models.
{done} of {planned} runs are done.

A pair with unequal targets is followed by the same one with equal targets (`-longer`, `-shorter`), and so with unequal
steps: what it lacks of the difference above it comes from the targets. An order that holds in no pair is denied by
this miniature. Its short segments ({segment} words) or its short training (about a million words at most) may be the
cause; they were not varied apart.
"""
CURVES = """\
![Validation perplexity by attention length, four panels](curves.png)

Lines are means over the seeds, shades their range; dashed lines are models without recurrence. Rows that no panel
shows have other steps than one of these, or lie on its line; [curves.csv](curves.csv) has them all.
"""
CONTROL = """\
## Control

The sentences of the text in random order (Section 4.2, Table 7). No dependency reaches from one sentence to the next,
so the gain of recurrence that remains comes from contexts that are not cut at segments. These rows learn from the same
sentences as those above, and both texts that score them have their own sentences in another order."""
SHUFFLED_CURVES = "![Validation perplexity by attention length, sentences shuffled](curves_shuffled.png)\n"
CONTEXT = """\
## Context

By Appendix C: every position is read from scratch with a given number of words before it. The measure takes the better
of two losses at each of the hardest positions, so a model whose losses merely fluctuate with the context gains too. An
ECL up to the longest context has that cause, and is left out (–). Table 8's QRNN has no row.
"""
CAUSES = """\
The measure counts losses that change with the context as gain where they fall, and not as loss where they rise, so a
long RECL is no lower perplexity. That is why it does not put ours before Shaw's, as perplexity does: Shaw's encoding
is best at an attention length of {shaw_at} ({shaw_best:.2f} on the validation text) and worse at {longest}
({shaw_longest:.2f}), while ours stays at {ours_longest:.2f} (best {ours_best:.2f} at {ours_at}). Models without
recurrence, and the LSTM, learn from {segment} words at a time, two steps of the measure, so that one step decides
their order; why the LSTM remembers no more than these is not known.
"""
RECL = "![RECL of each model: a dot a seed, and the widest interval](context_length.png)\n"
ATTENTION = """\
## Attention

Of one model, {model}, on {date}: {queries:,} queries, each of which sees {span} words.
The paper says of its model that (a) alone is almost uniform, that (b) looks like the whole, and that (d) is flatter,
nearer words first. Each term as if it were the whole score: means over all heads; how the mean's curve over the
distances correlates with that of the whole score; and how, over the heads, a head's share within {near} words does,
which is what tells (b) from (d)."""
TERMS = """\
![Attention by distance for each head: whole score, (a), (b), (d)](attention_terms.png)

A row is a head, the first layer's on top. All four panels have one logarithmic scale."""
ARTICLES = """\
## Articles

`make paper` writes the first three to `build/paper/articles.md`, without selection: a context of the test text, the
model's continuation, and the text's own. They are not kept here, because most of each is the text's.
"""
LARGE = """\
## On a GPU

The rows at the paper's size are recipes with the options below. The shapes are chosen here, because the paper gives
only numbers of parameters.

```bash
{commands}
```

The last rows of Table 6, one model at several attention lengths:

```bash
txl-evaluate --model runs/recurrence-ours-full --data data/wikitext-103 --memory_length 150 300 450 640 \\
    --clamp_len 400 --same_length true --plot curve.png
```
"""
PUBLISHED = """\
## Published checkpoints

`published.py` downloads the checkpoints of the authors and of the Hub, resumes broken downloads, records checksums,
converts, evaluates with the published settings, and prints the figure beside the published one. You supply the test
text. The suite tests this with a local server, `pytest -m network` with the real ones.

```bash
python examples/paper/published.py wt103 --output checkpoints --data wikitext-103/wiki.test.tokens
python examples/paper/published.py transfo-xl-wt103 --output checkpoints
```
"""
COMMANDS = {
    "Table 6": ("wt103_ablation", "wikitext-103", "recurrence-ours-full", ""),
    "Shaw's encoding": ("wt103_ablation", "wikitext-103", "recurrence-shaw-full", "--attn_type 1"),
    "half losses": ("wt103_ablation", "wikitext-103", "recurrence-ours-half", "--loss half --tgt_len 64"),
    "no recurrence": ("wt103_ablation", "wikitext-103", "none-ours-full", "--mem_len 0"),
    "absolute positions": (
        "wt103_ablation",
        "wikitext-103",
        "none-vaswani-half",
        "--attn_type 2 --mem_len 0 --loss half --tgt_len 64",
    ),
    "Al-Rfou": (
        "wt103_ablation",
        "wikitext-103",
        "none-al-rfou-half",
        "--attn_type 3 --n_head 10 --d_head 41 --mem_len 0 --loss half --tgt_len 64",
    ),
    "Table 10": ("wt103_ablation", "wikitext-103", "none-ours-full-176", "--mem_len 0 --tgt_len 176"),
    "Table 7": ("lm1b_ablation", "lm1b", "lm1b-recurrence", ""),
    "Table 7, no recurrence": ("lm1b_ablation", "lm1b", "lm1b-none", "--mem_len 0 --eval_mem_len 0"),
}


def main(argv: list[str] | None = None):
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results_folder(), help="(%(default)s)")
    options = parser.parse_args(argv)
    with one_line_errors():
        write_text(options.results / "README.md", page(options.results))


def page(results: Path) -> str:
    """The page in Markdown, from the files of a folder of results.

    Raises:
        FileNotFoundError: no run is done.
        ValueError: the runs do not belong on one page, as they have different sizes.
    """
    rows = harness.read(results / "rows.csv")
    if not rows:
        raise FileNotFoundError(f"{results} has no rows.csv: run examples/paper/ablation.py first")
    texts = list(dict.fromkeys(row["text"] for row in rows))
    plain = [text for text in texts if SHUFFLED not in text]
    sizes = sizes_of(rows, results)
    parts = [introduction(plain[0] if plain else texts[0], rows, sizes)]
    planned = len(ablation.TABLE) * 3
    for text in plain:
        # An LSTM and a GPT-2 have no attention length, and no row.
        if not (chosen := ablation.of(rows, text)):
            continue
        parts.append(ABLATION.format(done=len(chosen), planned=planned, **sizes))
        parts.append(f"{ablation.table(chosen)}\n\n{ablation.orders(chosen)}\n\n{CURVES}")
    for text in texts:
        if SHUFFLED in text and (chosen := ablation.of(rows, text)):
            parts.append(control(chosen))
    if context := harness.read(results / "context_length.csv"):
        parts.append(f"{CONTEXT}\n{context_length.table(context)}\n\n{context_length.orders(context)}\n")
        parts.append(f"{causes(harness.read(results / 'curves.csv'), plain, sizes)}{RECL}")
    if heads := harness.read(results / "attention.csv"):
        parts.append(attention(heads))
    parts.append(ARTICLES)
    missing = [name for name, file in FILES.items() if not (results / file).exists()]
    if missing:
        parts.append(f"Not computed yet, and made by `make paper`: {', '.join(missing)}.\n")
    return "\n".join([*parts, LARGE.format(commands=commands()), PUBLISHED, origin(rows)])


MADE_WITH = (
    "layers",
    "width",
    "segment",
    "vocabulary",
    "steps",
    "streams",
    "learning_rate",
    "characters",
    "lengths",
    "evaluation_streams",
)
FILES = {"context": "context_length.csv", "attention": "attention.csv"}


def sizes_of(rows: list[dict[str, str]], results: Path) -> dict[str, Any]:
    """The sizes that the page names, as the rows have them.

    Raises:
        ValueError: rows have different ones.
    """
    sizes = {}
    for name in MADE_WITH:
        # Rows named -longer and -shorter are meant to have other steps, about a multiple of the table's.
        shares = [ROWS[row["row"]].steps if name == "steps" else 1 for row in rows]
        given = [ast.literal_eval(row[name]) for row in rows]
        exact = [value for value, share in zip(given, shares, strict=True) if share == 1]
        found = sorted(set(exact or [round(value / share) for value, share in zip(given, shares, strict=True)]))
        if len(found) > 1:
            values = " and ".join(map(str, found))
            raise ValueError(f"{results / 'rows.csv'} has runs with {name} {values}: one page needs runs of one size")
        sizes[name] = found[0]
    _, sizes["characters"] = sizes["characters"]
    sizes["longest"] = round(max(sizes["lengths"]) * sizes["segment"])
    return sizes


def introduction(text: str, rows: list[dict[str, str]], sizes: dict[str, Any]) -> str:
    lines = [f"| {what} | `python {command}` | {where} |\n" for what, command, where in CONTENTS]
    parameters = max(int(row["parameters"]) for row in rows) / 1e6
    recipe = yaml.safe_load((RECIPES / "wt103_ablation.yaml").read_text(encoding="utf-8"))
    targets = recipe["max_steps"] * recipe["batch_size"] * recipe["tgt_len"]
    return "".join([INTRODUCTION, *lines]).format(
        text=text,
        parameters=parameters,
        larger=128 / parameters,
        longer=targets / (sizes["steps"] * sizes["streams"] * sizes["segment"]),
        **sizes,
    )


def control(rows: list[dict[str, str]]) -> str:
    parts = [CONTROL, ablation.table(rows, ablation.TABLE_7), ablation.orders(rows), SHUFFLED_CURVES]
    return "\n\n".join(parts)


def causes(curves: list[dict[str, str]], texts: list[str], sizes: dict[str, Any]) -> str:
    """Why the RECL of Shaw's encoding is the longest; "" without the curves that show it."""
    figures: dict[str, Any] = {}
    for key, name in (("ours", "recurrence-ours-full"), ("shaw", "recurrence-shaw-full")):
        chosen = [row for row in curves if row["text"] in texts and row["row"] == name and row["protocol"] == "memory"]
        lengths = sorted({int(row["length"]) for row in chosen})
        means = {
            length: ablation.mean([float(row["perplexity"]) for row in chosen if int(row["length"]) == length])
            for length in lengths
        }
        if not means:
            return ""
        at = min(means, key=means.__getitem__)
        figures |= {f"{key}_at": at, f"{key}_best": means[at], f"{key}_longest": means[lengths[-1]]}
    return CAUSES.format(**figures, **sizes) + "\n"


def attention(rows: list[dict[str, str]]) -> str:
    span = int(rows[0]["span"])
    first = rows[0]
    near = attention_maps.near_of(span)
    said = ATTENTION.format(
        model=first["model"], date=first["date"], span=span, queries=int(first["queries"]), near=near
    )
    return "\n\n".join([said, attention_maps.table(rows, span), TERMS]) + "\n"


def commands() -> str:
    lines = []
    for title, (recipe, data, name, options) in COMMANDS.items():
        command = f"python examples/train_lm.py examples/recipes/{recipe}.yaml --data data/{data} --output runs/{name}"
        lines.append(f"# {title}\n{' '.join(filter(None, (command, options)))}")
    return "\n".join(lines)


def origin(rows: list[dict[str, str]]) -> str:
    """Where and with what the rows were computed."""
    found = {
        name: ", ".join(sorted({row[name] for row in rows if row[name]}))
        for name in ("date", "commit", "processor", "torch", "transformers")
    }
    seconds = sum(float(row["processor_seconds"]) for row in rows)
    said = "; ".join(f"{name} {value}" for name, value in found.items() if value)
    return (
        f"## Where\n\n{said}. One thread a run, {seconds / 60:.0f} minutes of processor time for training. "
        "[rows.csv](rows.csv) and [curves.csv](curves.csv) have every run, [log.txt](log.txt) what "
        "was printed.\n"
    )


if __name__ == "__main__":
    main()
