"""Where the heads look (Figures 5 and 7, Appendix D): by distance, and what each term of the score adds.

    python examples/paper/attention_maps.py                       # the miniature's model with recurrence
    python examples/paper/attention_maps.py --model wt103 --data data/wikitext-103 --memory_length 640 \
        --output build/maps
    python examples/paper/attention_maps.py --smoke --output build/maps

Any checkpoint with the relative encoding will do, a converted one too. Every query sees as many keys as the memory is
long (`same_length`). `attention_terms.png` has a row for each head, first layer on top, and the attention at each
distance, the mean over all queries (Figure 5): of the whole score, and of the terms (a), (b) and (d) of Section 3.3,
each as if it were the whole score (Figure 7; the paper leaves out (c) too). All have one scale of colours.
`attention.csv` has the numbers: for each head and term the share of the attention that is within a tenth of the span,
the mean distance in spans (uniform: 0.5), and the entropy as a share of that of uniform attention; and of each term
how its curve over the distances, the mean over the heads, correlates with that of the whole. The table has beside it
how the share within a tenth of the span correlates over the heads: whether a term looks where its head does.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib
import numpy as np
import torch
import transformers
from matplotlib.colors import LogNorm
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ablation
import harness
from miniature import RESULTS, MiniatureParser, load_given
from txl_hf import TransfoXLForCausalLM, evaluate_language_model
from txl_hf.command_line import at_least_one, hub_or_folder, one_line_errors
from txl_hf.transfo_xl.attention_transfo_xl import (
    BACKENDS,
    AttentionInputs,
    Backend,
    add_bias,
    hide,
    position_scores,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 -- after the choice of what draws.

PARTS = ("whole", "a", "b", "d")
TITLES = {"whole": "whole score", "a": "(a) content", "b": "(b) position by content", "d": "(d) position"}
# Queries of a segment.
WORDS = 20


def content_scores(inputs: AttentionInputs) -> Tensor:
    """(a) + (c): (B, H, L, K)."""
    return add_bias(inputs.query, inputs.content_bias) * inputs.scaling @ inputs.key.transpose(-1, -2)


class AttentionTerms(NamedTuple):
    """The score of each query for each key as the sum of what it is made of: (B, H, L, K) each, 0 where not visible.

    Args:
        content: (a), q_i·k_j. position: (b), q_i·W_R R. content_bias: (c), u·k_j.
        position_bias: (d), v·W_R R, or the learned score per distance.
        visible: (B, 1, L, K) bool, which key each query may attend to. The attention probabilities are the
            softmax over visible keys of the terms' sum.
    """

    content: Tensor
    position: Tensor
    content_bias: Tensor
    position_bias: Tensor
    visible: Tensor


def attention_terms(inputs: AttentionInputs) -> AttentionTerms:
    """The four terms of A_ij (Section 3.3) one by one, scaled; what `inputs` lacks is 0. See `relative_attention`."""
    (B, H, L, _), K = inputs.query.shape, inputs.key.shape[2]
    visible = hide(inputs.query.new_zeros(B, 1, L, K), inputs) == 0
    # What is left of the scores where the queries are zeros is what the biases give.
    biases = inputs._replace(query=torch.zeros_like(inputs.query))
    found = (
        content_scores(inputs._replace(content_bias=None)),
        position_scores(inputs._replace(position_bias=None, rel_bias=None)),
        content_scores(biases),
        position_scores(biases),
    )
    nothing = inputs.query.new_zeros(B, H, L, K)
    a, b, c, d = (nothing if scores is None else scores.masked_fill(~visible, 0) for scores in found)
    return AttentionTerms(content=a, position=b, content_bias=c, position_bias=d, visible=visible)


class Recorder:
    """An attention backend that computes as eager does, and adds up where each head looks.

    Attributes:
        sums: {part of the score: (layers, heads, span)}, attention by distance, over `queries` queries.
    """

    def __init__(self, layers: int, heads: int, span: int):
        self.layers, self.span, self.calls, self.queries = layers, span, 0, 0
        self.sums = {part: torch.zeros(layers, heads, span, dtype=torch.float64) for part in PARTS}

    def __call__(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        layer, self.calls = self.calls % self.layers, self.calls + 1
        terms = attention_terms(inputs)
        whole = terms.content + terms.position + terms.content_bias + terms.position_bias
        scores = {"whole": whole, "a": terms.content, "b": terms.position, "d": terms.position_bias}
        hidden = ~terms.visible
        shares = {part: score.masked_fill(hidden, -torch.inf).softmax(-1) for part, score in scores.items()}
        L, K = whole.shape[-2:]
        # Queries near the beginning of the text see less than the others.
        if K >= L + self.span - 1:
            columns = torch.arange(L)[:, None] + K - L - torch.arange(self.span)
            for part, share in shares.items():
                by_distance = share.cpu().gather(-1, columns.expand(*share.shape[:2], L, self.span))
                self.sums[part][layer] += by_distance.double().sum((0, 2))
            self.queries += whole.shape[0] * L if layer == 0 else 0
        return shares["whole"] @ inputs.value, shares["whole"]

    def means(self) -> dict[str, Tensor]:
        """{part: (layers, heads, span)}, each adds up to 1 over the distances."""
        return {part: total / self.queries for part, total in self.sums.items()}


def main(argv: list[str] | None = None):
    options = parse_arguments(argv)
    transformers.logging.disable_progress_bar()
    with one_line_errors():
        model, token_ids, name = load(options)
        recorder = record(model, token_ids, options)
        options.output.mkdir(parents=True, exist_ok=True)
        report(recorder, name, options)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = MiniatureParser(__doc__, RESULTS, memory_length=30, max_tokens=200)
    parser.add_argument(
        "--model", type=hub_or_folder, help="folder or Hub name (the miniature's model with recurrence)"
    )
    parser.add_argument("--data", type=Path, help="folder of prepare_corpus.py, with --model")
    parser.add_argument("--memory_length", type=int, help="the span shown (the model's mem_len; miniature: 80)")
    parser.add_argument("--clamp_len", type=int, help="(the model's)")
    parser.add_argument("--max_tokens", type=at_least_one, default=10_000, help="of the text (%(default)s)")
    options = parser.parse_study(argv)
    if bool(options.model) != bool(options.data):
        parser.error("--model and --data go together")
    if options.model:
        parser.keep_out(options.output, "--model is not the miniature, whose results are kept there")
    return options


def load(options: argparse.Namespace) -> tuple[TransfoXLForCausalLM, Any, str]:
    """The model, its text as token ids, and what it is called.

    Raises:
        ValueError: the model has no relative encoding, or the text has another vocabulary.
    """
    if options.model is None:
        model, corpus, name = ablation.trained("recurrence-ours-full", options)
        token_ids = corpus.texts["validation"]
    else:
        [model], text = load_given([options.model], options.data, "validation")
        token_ids, name = text.token_ids, options.model
    if not isinstance(model, TransfoXLForCausalLM) or model.config.attn_type != 0:
        raise ValueError(f"{name} has no relative encoding with the terms (a) to (d), which attn_type=0 alone has")
    if options.memory_length is None:
        options.memory_length = options.sizes.longest if options.model is None else model.config.mem_len
    if options.memory_length < 10:
        raise ValueError(f"--memory_length {options.memory_length} is no span to look at: give 10 or more")
    return model.eval(), token_ids[: options.max_tokens], name


def record(model: TransfoXLForCausalLM, token_ids, options: argparse.Namespace) -> Recorder:
    """Read the text, and put the model's own backend back.

    Raises:
        ValueError: the text is shorter than the memory.
    """
    config, span = model.config, options.memory_length
    if len(token_ids) < span + 2 * WORDS:
        raise ValueError(f"{len(token_ids)} tokens of text are too few for a memory of {span} and {WORDS} queries")
    recorder = Recorder(config.n_layer, config.n_head, span)
    own, counts_self = config._attn_implementation, config.same_length_counts_self
    BACKENDS["recorder"] = Backend("recorder", recorder)
    try:
        model.set_attn_implementation("recorder")
        # With its own among them, each query sees as many keys as the memory is long.
        config.same_length_counts_self = True
        # As many whole segments as there are, so that the last one has all of its queries.
        ids = token_ids[(len(token_ids) - 1) % WORDS :]
        evaluate_language_model(model, ids, WORDS, span, ext_len=0, clamp_len=options.clamp_len, same_length=True)
    finally:
        config.same_length_counts_self = counts_self
        model.set_attn_implementation(own)
        del BACKENDS["recorder"]
    return recorder


def near_of(span: int) -> int:
    """Distances that count as near: a tenth of the span."""
    return max(1, span // 10)


# ---- numbers ----------------------------------------------------------------------------------------------------


def measures(curve: Tensor) -> dict[str, float]:
    """Of attention by distance, (span,): share within a tenth, mean distance in spans, relative entropy."""
    span = len(curve)
    distance = (torch.arange(span, dtype=torch.float64) + 0.5) / span
    entropy = torch.special.entr(curve).sum() / np.log(span)
    near = curve[: near_of(span)].sum()
    return {"near": near.item(), "mean_distance": (curve * distance).sum().item(), "entropy": entropy.item()}


def rows_of(means: dict[str, Tensor]) -> list[dict[str, Any]]:
    """One row for each head and part, and one for the mean over all heads (head 0)."""
    rows = []
    for part, values in means.items():
        for layer, heads in enumerate(values, start=1):
            for head, curve in enumerate(heads, start=1):
                number = (layer - 1) * len(heads) + head
                rows.append({"part": part, "layer": layer, "head": number, **rounded(measures(curve))})
        curve, whole = values.mean((0, 1)), means["whole"].mean((0, 1))
        alike = torch.corrcoef(torch.stack([curve, whole]))[0, 1].item()
        rows.append({"part": part, "layer": 0, "head": 0, **rounded(measures(curve)), "correlation": round(alike, 4)})
    return rows


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


# ---- results ----------------------------------------------------------------------------------------------------


def report(recorder: Recorder, name: str, options: argparse.Namespace):
    means = recorder.means()
    rows = rows_of(means)
    origin = {**harness.origin("cpu", "fp32", torch.get_num_threads()), **harness.versions(), "model": name}
    path = options.output / "attention.csv"
    path.unlink(missing_ok=True)
    harness.append(path, [{**origin, "span": recorder.span, "queries": recorder.queries, **row} for row in rows])
    text = table([{key: str(value) for key, value in row.items()} for row in rows], recorder.span)
    print(text)
    plot(means, options.output / "attention_terms.png")


def table(rows: list[dict[str, str]], span: int) -> str:
    """The mean over all heads, term by term, and the correlation over them."""
    near = near_of(span)
    by_head = {
        part: [float(row["near"]) for row in rows if row["part"] == part and row["head"] != "0"] for part in PARTS
    }
    lines = [
        f"| score | within {near} of {span} tokens | mean distance / span | entropy / uniform | correlation with the "
        "whole, by distance | by head |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["head"] == "0":
            figures = [f"{float(row[key]):.3f}" for key in ("near", "mean_distance", "entropy", "correlation")]
            figures.append(correlation(by_head[row["part"]], by_head["whole"]))
            lines.append(f"| {TITLES[row['part']]} | {' | '.join(figures)} |")
    lines.append(f"| uniform | {near / span:.3f} | 0.500 | 1.000 | – | – |")
    return "\n".join(lines)


def correlation(values: list[float], others: list[float]) -> str:
    """Pearson's; – where one is constant."""
    if min(len(set(values)), len(set(others))) < 2:
        return "–"
    return f"{statistics.correlation(values, others):.2f}"


def plot(means: dict[str, Tensor], path: Path):
    """Each part of the score: (layers, heads, span) as a row a head, darker for more attention, on one log scale."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained", sharex=True, sharey=True)
    largest = max(float(values.max()) for values in means.values())
    norm = LogNorm(max(1e-4, min(float(values.min()) for values in means.values())), largest, clip=True)
    for axis, part in zip(axes.flat, PARTS, strict=True):
        rows = means[part].flatten(0, 1)
        count, span = rows.shape
        # From the furthest distance to the query's own place.
        edges = (span - 0.5, -0.5, count + 0.5, 0.5)
        image = axis.imshow(
            rows.flip(-1).numpy(), aspect="auto", cmap="Blues", norm=norm, interpolation="nearest", extent=edges
        )
        axis.set_title(TITLES[part], fontsize=15)
        axis.set_yticks([1, count])
        axis.tick_params(labelsize=13)
    for axis in axes[1]:
        axis.set_xlabel("distance, tokens", fontsize=14)
    for axis in axes[:, 0]:
        axis.set_ylabel("head", fontsize=14)
    bar = figure.colorbar(image, ax=axes)
    bar.set_label("attention, mean over queries", fontsize=14)
    bar.ax.tick_params(labelsize=13)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
