"""Relative effective context length (Table 8, Appendix C): how far back does each model look?

    python examples/paper/context_length.py                # the group of the miniature, trained where it is missing
    python examples/paper/context_length.py --models runs/wt103 runs/lstm --data data/wikitext-103 --contexts 1000 \
        --step 100 --output build/context
    python examples/paper/context_length.py --smoke --output build/context

A group is any causal models of `transformers` with one vocabulary: ours, GPT-2, an LSTM. With c tokens of context
model i loses l_i(c, t) at position t, and the group's best is b(c, t) = min_i l_i(c, t). T are the r · N positions
where b is largest: those that no model of the group finds easy. The gain of model i from c to c' is, in perplexity
over T,

    g_i = 1 - exp(mean min(b(c, t), l_i(c', t))) / exp(mean b(c, t)),

and the relative effective context length (RECL) is the first c from which a step gains less than 1 %. It belongs to
the group, which is therefore always named. The effective context length (ECL) has l_i(c, t) for b. Every loss is of
exactly c tokens read from scratch: no memory lets more through. A model that counts positions from the segment's end,
or has learned no more of them, sees at most as many tokens as it was trained on, and gains nothing beyond.

Intervals are the middle 95 % over resamples of the positions (bootstrap). `context_length.csv` has the rows of each
seed of the miniature, written when they are measured: a run that was stopped goes on with the next seed. Of an ECL
that ends at the longest context the table has no number, because a model whose losses merely fluctuate with the
context has that one too.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib
import numpy as np
import torch
import transformers
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ablation
import harness
from contenders import losses_of, uses_segment_end
from miniature import RESULTS, Corpus, MiniatureParser, load_given, prepare
from study import options_that_differ
from txl_hf import TransfoXLForCausalLM
from txl_hf.command_line import at_least_one, at_least_zero, hub_or_folder, one_line_errors

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 -- after the choice of what draws.

GROUP = ["recurrence-ours-full", "recurrence-shaw-full", "none-ours-full", "none-vaswani-half", "lstm", "gpt2"]
FRACTIONS = (0.1, 0.5, 1.0)
# Table 8, in the columns of FRACTIONS; QRNN is left out, as no model here is one.
PAPER = {
    "recurrence-ours-full": (700, 600, 500),
    "recurrence-shaw-full": (400, 400, 300),
    "none-ours-full": (300, 300, 300),
    "none-vaswani-half": (128, 128, 128),
    "lstm": (400, 300, 200),
}


def main(argv: list[str] | None = None):
    options = parse_arguments(argv)
    transformers.logging.disable_progress_bar()
    path = options.output / "context_length.csv"
    with one_line_errors():
        if options.models:
            found, text = load_given(options.models, options.data, "test")
            path.unlink(missing_ok=True)
            models = dict(zip(options.models, found, strict=True))
            harness.append(path, rows_of(models, text.token_ids, options, text=options.data.name))
        else:
            corpus = prepare(options.work / "corpus", options.sizes)
            for seed in seeds_left(path, corpus, options):
                models = {name: ablation.trained(name, options, seed)[0] for name in GROUP}
                harness.append(path, rows_of(models, corpus.texts["test"], options, text=corpus.name, seed=seed))
        rows = harness.read(path)
        print(f"{table(rows)}\n\n{orders(rows)}")
        plot(rows, path.with_suffix(".png"))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = MiniatureParser(__doc__, RESULTS, contexts=16, step=4, positions=40, resamples=5)
    parser.add_argument("--models", type=hub_or_folder, nargs="+", help="folders or Hub names (rows of the miniature)")
    parser.add_argument("--data", type=Path, help="folder of prepare_corpus.py, with --models")
    parser.add_argument(
        "--seeds", type=at_least_zero, nargs="+", default=[0, 1, 2], help="of the miniature's models (%(default)s)"
    )
    parser.add_argument(
        "--contexts", type=at_least_one, default=160, help="the longest context, in tokens (%(default)s)"
    )
    parser.add_argument("--step", type=at_least_one, default=8, help="Δ, from one context to the next (%(default)s)")
    parser.add_argument("--positions", type=at_least_one, default=1000, help="how many are scored (%(default)s)")
    parser.add_argument("--resamples", type=at_least_one, default=200, help="of the bootstrap (%(default)s)")
    options = parser.parse_study(argv)
    if bool(options.models) != bool(options.data):
        parser.error("--models and --data go together")
    if options.models:
        parser.keep_out(options.output, "--models are not the miniature, whose results are kept there")
    if options.contexts < 2 * options.step:
        parser.error(f"--contexts {options.contexts} leaves no second context after --step {options.step}")
    return options


def measured_with(options: argparse.Namespace) -> dict[str, int]:
    """The columns of a row that say how it was measured."""
    longest = options.contexts // options.step * options.step
    return {"positions": options.positions, "step": options.step, "contexts": longest}


def seeds_left(path: Path, corpus: Corpus, options: argparse.Namespace) -> list[int]:
    """The seeds that the results do not have yet.

    Raises:
        ValueError: the results have a seed that was measured otherwise.
    """
    today = {**measured_with(options), "text": corpus.name, "group": " ".join(GROUP)}
    wanted, rows = {name: str(value) for name, value in today.items()}, harness.read(path)
    for row in rows:
        if changed := options_that_differ({name: row[name] for name in wanted}, wanted):
            raise ValueError(f"{path} has seed {row['seed']} of other options: {changed}; name another --output")
    return [seed for seed in options.seeds if str(seed) not in {row["seed"] for row in rows}]


# ---- losses -----------------------------------------------------------------------------------------------------


def measure(models: dict[str, Any], token_ids, contexts: list[int], positions: int) -> Tensor:
    """(models, contexts, positions) losses in nats, each of a token after exactly so many others.

    Raises:
        ValueError: the text is too short for so many positions, or the models' vocabularies differ.
    """
    step = contexts[0]
    available = (len(token_ids) - 1 - contexts[-1]) // step + 1
    if available < positions:
        raise ValueError(
            f"the text has {len(token_ids)} tokens, room for {max(available, 0)} positions {step} apart after "
            f"{contexts[-1]} tokens, not for {positions}"
        )
    sizes = {model.config.vocab_size for model in models.values()}
    if len(sizes) > 1:
        raise ValueError(f"models of one group need one vocabulary, but theirs have {sorted(sizes)} tokens")
    places = contexts[-1] + step * np.linspace(0, available - 1, positions).astype(int)
    return torch.stack([window_losses(model, token_ids, contexts, places) for model in models.values()])


@torch.no_grad()
def window_losses(model: Any, token_ids, contexts: list[int], places: np.ndarray, batch_size: int = 16) -> Tensor:
    """(contexts, positions) losses of the tokens at `places` with so many tokens before each.

    A causal model that counts positions from the window's start, or their distances, computes what it says of a prefix
    whatever follows it: a window that starts at a position's furthest context gives one loss of each place up to its
    end. So a window of the longest context is read once for each start, and not one window for each context.
    """
    model.eval()
    if isinstance(model, TransfoXLForCausalLM):
        # A window is all there is: neither zeros of an initial memory before it, nor a limit within it.
        model.reset_memory_length(0)
        model.config.same_length = False
    ids = torch.as_tensor(np.asarray(token_ids[: int(places.max()) + 1]).astype(np.int64), device=model.device)
    longest = furthest(model, contexts[-1])
    found = torch.zeros(len(contexts), len(places), device=model.device)
    if uses_segment_end(model):
        parts = np.array_split(places, -(-len(places) // batch_size))
        for k, context in enumerate(min(context, longest) for context in contexts):
            found[k] = torch.cat([read(model, ids, part, context)[:, -1] for part in parts])
        return found.cpu()
    reach = sorted({min(context, longest) for context in contexts})
    starts = np.unique((places[None] - np.array(reach)[:, None]).ravel())
    rows = {int(start): i for i, start in enumerate(starts)}
    window = np.minimum(longest, len(ids) - 1 - starts)
    losses = torch.zeros(len(starts), longest, device=model.device)
    for length in np.unique(window):
        of_length = np.flatnonzero(window == length)
        for part in np.array_split(of_length, -(-len(of_length) // batch_size)):
            losses[part, :length] = read(model, ids, starts[part] + length, int(length))
    for k, context in enumerate(contexts):
        context = min(context, longest)
        found[k] = losses[[rows[int(place) - context] for place in places], context - 1]
    return found.cpu()


def read(model: Any, ids: Tensor, ends: np.ndarray, length: int) -> Tensor:
    """(B, length) losses of the tokens that end at `ends`, read from scratch."""
    places = torch.as_tensor(ends, device=ids.device)[:, None] + torch.arange(-length, 1, device=ids.device)
    windows = ids[places]
    return losses_of(model, windows[:, :-1], windows[:, 1:])[0].float()


def furthest(model: Any, longest: int) -> int:
    """How many tokens a model reads at once: as many as it learned positions of, or all."""
    config = model.config
    if uses_segment_end(model):
        return config.max_klen or config.tgt_len + config.ext_len
    if isinstance(model, TransfoXLForCausalLM):  # relative positions have no end
        return longest
    names = ("n_positions", "max_position_embeddings", "max_seq_len")
    return min([longest, *(getattr(config, name) for name in names if getattr(config, name, None))])


# ---- Appendix C -------------------------------------------------------------------------------------------------


def gains(losses: Tensor, i: int, r: float, relative: bool = True) -> Tensor:
    """The gain of each step of model i, (contexts - 1,): 1 - exp f(c, c') / exp f(c, c).

    Args:
        losses: (models, contexts, positions). r: the fraction of positions, the hardest ones.
        relative: beside the best of the group (RECL), or beside the model itself (ECL).
    """
    found = []
    for k in range(losses.shape[1] - 1):
        baseline = losses[:, k].min(0).values if relative else losses[i, k]
        hard = baseline.topk(max(1, round(r * len(baseline)))).indices
        before = baseline[hard].mean().exp()
        after = torch.minimum(baseline, losses[i, k + 1])[hard].mean().exp()
        found.append((before - after) / before)
    return torch.stack(found)


def effective_length(losses: Tensor, contexts: list[int], i: int, r: float, relative: bool = True) -> tuple[int, bool]:
    """The first context from which a step gains less than 1 %, and whether it ended the contexts instead."""
    gained = gains(losses, i, r, relative)
    short = (gained < 0.01).nonzero()
    return (contexts[int(short[0])], False) if len(short) else (contexts[-1], True)


def interval(losses: Tensor, contexts: list[int], i: int, r: float, relative: bool, resamples: int) -> tuple[int, int]:
    """The middle 95 % of the effective lengths of resampled positions."""
    generator, positions = torch.Generator().manual_seed(0), losses.shape[2]
    found = []
    for _ in range(resamples):
        chosen = torch.randint(positions, (positions,), generator=generator)
        found.append(effective_length(losses[:, :, chosen], contexts, i, r, relative)[0])
    low, high = np.quantile(found, [0.025, 0.975], method="nearest")
    return int(low), int(high)


# ---- results ----------------------------------------------------------------------------------------------------


def rows_of(models: dict[str, Any], token_ids, options: argparse.Namespace, **of: Any) -> list[dict[str, Any]]:
    """RECL and ECL of each model of a group at each fraction of positions; `of`: text and seed."""
    contexts = list(range(options.step, options.contexts + 1, options.step))
    losses = measure(models, token_ids, contexts, options.positions)
    return [
        {
            **harness.origin("cpu", "fp32", torch.get_num_threads()),
            **harness.versions(),
            **of,
            "model": name,
            "measure": "RECL" if relative else "ECL",
            "r": r,
            "length": (found := effective_length(losses, contexts, i, r, relative))[0],
            "at_least": found[1],
            "low": (bounds := interval(losses, contexts, i, r, relative, options.resamples))[0],
            "high": bounds[1],
            "paper": PAPER[name][FRACTIONS.index(r)] if relative and name in PAPER else "",
            **measured_with(options),
            "group": " ".join(models),
        }
        for relative in (True, False)
        for i, name in enumerate(models)
        for r in FRACTIONS
    ]


def table(rows: list[dict[str, str]]) -> str:
    """RECL and ECL with their intervals, the paper's RECL beside them, and the group that they belong to."""
    head = "| model | " + " | ".join(f"{kind}, r = {r}" for kind in ("RECL", "ECL") for r in FRACTIONS)
    lines = [f"{head} | paper's RECL |", "|---" * 8 + "|"]
    for name in dict.fromkeys(row["model"] for row in rows):
        cells = [_cell(_chosen(rows, name, kind, r)) for kind in ("RECL", "ECL") for r in FRACTIONS]
        paper = [_chosen(rows, name, "RECL", r)[0]["paper"] for r in FRACTIONS]
        lines.append(f"| {name} | {' | '.join(cells)} | {' / '.join(paper) if all(paper) else '–'} |")
    first = rows[0]
    lines.append(
        f"\nIn tokens, steps of {first['step']} up to {first['contexts']}, at {first['positions']} positions: the "
        "length of each seed, or one length where all have the same, and the middle 95 % of resampled positions, the "
        f"widest of the seeds. RECL belongs to this group of models: {first['group']}."
    )
    return "\n".join(lines)


def _chosen(rows: list[dict[str, str]], model: str, measure: str, r: float) -> list[dict[str, str]]:
    """A row a seed."""
    wanted = (model, measure, r)
    return [row for row in rows if (row["model"], row["measure"], float(row["r"])) == wanted]


def _cell(rows: list[dict[str, str]]) -> str:
    """The lengths of the seeds, with the widest interval; – for an ECL that nothing ended."""
    ecl = rows[0]["measure"] == "ECL"
    lengths = ["–" if ecl and row["length"] == row["contexts"] else _shown(row, "length") for row in rows]
    if set(lengths) == {"–"}:
        return "–"
    ends = min(rows, key=lambda row: int(row["low"])), max(rows, key=lambda row: int(row["high"]))
    interval = dict.fromkeys(_shown(row, name) for row, name in zip(ends, ("low", "high"), strict=True))
    return f"{lengths[0] if len(set(lengths)) == 1 else ', '.join(lengths)} ({'–'.join(interval)})"


def _shown(row: dict[str, str], name: str) -> str:
    """A length; the longest context is one that nothing ended, see `effective_length`."""
    return f"≥ {row[name]}" if row[name] == row["contexts"] else row[name]


def orders(rows: list[dict[str, str]]) -> str:
    """For each two models of which the paper's RECL is nowhere the shorter one whether ours are in that order."""
    lines = []
    models = dict.fromkeys(row["model"] for row in rows)
    for longer, shorter in itertools.permutations((name for name in PAPER if name in models), 2):
        pairs = [*zip(PAPER[longer], PAPER[shorter], strict=True)]
        if any(first < second for first, second in pairs) or PAPER[longer] == PAPER[shorter]:
            continue
        ours, others = (
            np.array([[int(row["length"]) for row in _chosen(rows, name, "RECL", r)] for r in FRACTIONS])
            for name in (longer, shorter)
        )
        difference = float(ours.mean() - others.mean())
        said = ablation.verdict(difference, ablation.spread_of(*(each.mean(0).tolist() for each in (ours, others))))
        cells = f"longer in {(ours > others).sum()} of {ours.size}, equal in {(ours == others).sum()}"
        lines.append(f"* {longer} before {shorter}: {said} ({difference:+.1f}; {cells})")
    return (
        "Orders of the paper, by the RECL, of each seed the mean over r. An order holds where the means of the seeds "
        "differ by more than the seeds of either model do; after it how often the RECL of the same seed and r is in "
        "that order:\n\n"
    ) + "\n".join(lines)


def plot(rows: list[dict[str, str]], path: Path):
    """RECL of each model by the fraction of positions: a dot a seed, and their widest interval."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for shift, r in zip((-0.2, 0, 0.2), FRACTIONS, strict=True):
        color = f"C{FRACTIONS.index(r)}"
        for place, name in enumerate(names):
            own = _chosen(rows, name, "RECL", r)
            lengths, low, high = ([int(row[column]) for row in own] for column in ("length", "low", "high"))
            axis.hlines(place + shift, min(low), max(high), color=color, linewidth=2, alpha=0.5)
            label = f"r = {r}" if place == 0 else None
            axis.plot(lengths, [place + shift] * len(own), "o", markersize=8, color=color, label=label)
    axis.set_yticks(range(len(names)), names, fontsize=14)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("relative effective context length, tokens", fontsize=14)
    axis.tick_params(axis="x", labelsize=13)
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper right", ncols=len(FRACTIONS), fontsize=14, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
