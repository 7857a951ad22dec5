"""Write the page of the paper's experiments from the results: every figure on it comes from a committed file.

    python examples/paper/page.py

The page is `README.md` in `examples/results/paper`, and `paper` on the documentation's site.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ablation
import attention_maps
import context_length
import harness
from contenders import ROWS
from miniature import RESULTS, SHUFFLED
from txl_hf.command_line import CommandParser, one_line_errors
from txl_hf.files import write_text

INTRODUCTION = """\
# The paper's experiments

Each table and figure of [Transformer-XL](https://arxiv.org/abs/1901.02860) is one command. `make paper` runs them all
as a miniature on two CPU cores; **`make paper` again goes on where it was stopped**. The miniature has {layers} layers
of {width}, segments and a memory of {segment} words, a vocabulary of {vocabulary:,} words, and {steps:,} steps of
{streams} × {segment} words of {text}; it is post-norm, as the paper's models. It is thousands of times smaller than
they are, so that its perplexities compare with one another and with nothing else.

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
    ("Table 8, Figure 3: effective context length", "examples/paper/context_length.py", "[context](#context)"),
    ("Figures 5 to 7: where the heads look", "examples/paper/attention_maps.py", "[attention](#attention)"),
    ("Appendix E: generated articles", "examples/paper/article.py", "[articles](#articles)"),
    ("Table 9: evaluation speed", "benchmarks/sliding_window.py", "[benchmarks](../../../benchmarks/README.md)"),
    ("Tables 1 to 4: published checkpoints", "examples/paper/published.py NAME", "[below](#published-checkpoints)"),
    ("Tables 1 to 5: training", "examples/train_lm.py RECIPE", "[examples](../../README.md)"),
]
ABLATION = """\
## Ablation

A row's name says whether there is recurrence, whose encoding, and the loss. Equal steps on the same text in the same
order: a row with half losses learns from half as many targets, and one with longer segments from more. Rows named
`-longer` and `-shorter` have other steps and equal targets. `init` is the perplexity at the attention length of
training, `best` the lowest over the lengths and `at` the shortest where it is reached, each by validation text; after
± is half of what lies between the lowest and the highest seed. Rows named `-176` and `-172` have no `init`, here as in
the paper: no length that is scored is that of their segments. The last column has the paper's init / best @ attention
length, of far larger models. {done} of {planned} runs are done.

Some pairs stand twice in the list of orders, the second time with equal targets: what holds only there is a matter of
how much a row has read. What holds in neither, this miniature denies; its segments have {segment} words and its models
have read about a million at most, and which of the two is the reason we have not found out.
"""
CONTROL = """\
## Control

The same text with its sentences in another order: no dependency reaches from one sentence to the next, so that what
recurrence still gains it gains from contexts that are no longer cut at segments (Section 4.2, Table 7)."""
CONTEXT = """\
## Context

By Appendix C, each position read from scratch with so many words before it. At the hardest positions the measure takes
the better of two losses, so that a model whose losses only fluctuate with the context gains too: beside each length
belongs what the right picture says of all positions. The paper's order is its own encoding, Shaw's, no recurrence,
absolute positions; two models whose intervals overlap are not told apart here. Its QRNN has no row.
"""
ATTENTION = """\
## Attention

Of {model}: each query sees {span} words, {queries:,} queries. The paper says of its model that (a) alone is almost
uniform, that (b) looks like the whole, and that (d) is flatter, nearer words first. Means over all heads, each term as
if it were the whole score:"""
ARTICLES = """\
## Articles

`make paper` writes the first three, unpicked, to `build/paper/articles.md`: a context of the test text, what the model
goes on with, and what the text goes on with. They are not kept here, because most of them is the text's.
"""
LARGE = """\
## On a GPU

The same rows at the paper's size are recipes; what tells the rows of a table apart is on the command line. The shapes
are ours, because the paper gives the number of parameters alone.

```bash
{commands}
```

The last rows of Table 6, one model at several attention lengths, and their columns:

```bash
txl-evaluate --model runs/recurrence-ours-full --data data/wikitext-103 --memory_length 150 300 450 640 \\
    --clamp_len 400 --same_length true --plot curve.png
```
"""
PUBLISHED = """\
## Published checkpoints

`published.py` downloads what the authors and the Hub have, goes on after broken connections, records checksums,
converts, evaluates with the published settings, and prints the figure beside the published one. The test text is
yours. The suite proves the way on a server of its own; `pytest -m network` goes the real one.

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
    parser.add_argument("--results", type=Path, default=RESULTS, help="(%(default)s)")
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
    parts = [introduction(plain[0] if plain else texts[0], sizes)]
    planned = len(ablation.TABLE) * 3
    for text in plain:
        # An LSTM and a GPT-2 have no attention length, and no row.
        if not (chosen := ablation.of(rows, text)):
            continue
        parts.append(ABLATION.format(done=len(chosen), planned=planned, segment=sizes["segment"]))
        parts.append(f"{ablation.table(chosen)}\n\n{ablation.orders(chosen)}\n\n![{text}](curves.png)\n")
    for text in texts:
        if SHUFFLED in text and (chosen := ablation.of(rows, text)):
            parts.append(control(chosen))
    if context := harness.read(results / "context_length.csv"):
        parts.append(f"{CONTEXT}\n{context_length.table(context)}\n\n![context](context_length.png)\n")
    if heads := harness.read(results / "attention.csv"):
        parts.append(attention(heads))
    parts.append(ARTICLES)
    missing = [name for name, file in FILES.items() if not (results / file).exists()]
    if missing:
        parts.append(f"Not computed yet, and made by `make paper`: {', '.join(missing)}.\n")
    return "\n".join([*parts, LARGE.format(commands=commands()), PUBLISHED, origin(rows)])


FILES = {"context": "context_length.csv", "attention": "attention.csv"}


def sizes_of(rows: list[dict[str, str]], results: Path) -> dict[str, int]:
    """The sizes that the introduction names, as the rows have them.

    Raises:
        ValueError: rows have different ones.
    """
    sizes = {}
    for name in ("layers", "width", "segment", "vocabulary", "steps", "streams"):
        # Rows named -longer and -shorter are meant to have other steps, about a multiple of the table's.
        shares = [ROWS[row["row"]].steps if name == "steps" else 1 for row in rows]
        exact = [int(row[name]) for row, share in zip(rows, shares, strict=True) if share == 1]
        found = sorted(set(exact or [round(int(row[name]) / share) for row, share in zip(rows, shares, strict=True)]))
        if len(found) > 1:
            values = " and ".join(map(str, found))
            raise ValueError(f"{results / 'rows.csv'} has runs with {name} {values}: one page needs runs of one size")
        sizes[name] = found[0]
    return sizes


def introduction(text: str, sizes: dict[str, int]) -> str:
    lines = [f"| {what} | `python {command}` | {where} |\n" for what, command, where in CONTENTS]
    return "".join([INTRODUCTION, *lines]).format(text=text, **sizes)


def control(rows: list[dict[str, str]]) -> str:
    return "\n\n".join([CONTROL, ablation.table(rows, ablation.TABLE_7), ablation.orders(rows)]) + "\n"


def attention(rows: list[dict[str, str]]) -> str:
    span = int(rows[0]["span"])
    said = ATTENTION.format(model=rows[0]["model"], span=span, queries=int(rows[0]["queries"]))
    pictures = {"heads": "heads", "the widest heads over a text": "text", "terms": "terms"}
    shown = [f"![{name}](attention_{file}.png)" for name, file in pictures.items()]
    return "\n\n".join([said, attention_maps.table(rows, span), *shown]) + "\n"


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
