"""Memories longer than in training: what they cost without `decay_len`, with it, and with other mends.

    python examples/by_feature/long_memory.py --train train.txt --test test.txt --text characters --output rows.csv
    python examples/by_feature/long_memory.py --draw rows.csv curves.png
    python examples/by_feature/long_memory.py --smoke

Each contender trains as `characters_small` or `words_small` does, with a memory of M states, and scores the test text
with memories up to 32 M, with and without `decay_len`:

    recipe  as it is; its weights also score with clamp_len=M, and with scores times log(keys) / log(M + L), because
            attention over more keys is less sharp
    drawn   a memory whose length is drawn anew in each step, from 1 to M
    clamped clamp_len is drawn anew, from M / 4 to M, in half of the steps
    sink    a score of 0 beside those of the keys, so that a head may attend to nothing
"""

import time
from pathlib import Path

import common
from txl_hf.command_line import at_least_one, existing_file, new_path

CONTENDERS = ("recipe", "drawn", "clamped", "sink")
PARSER = common.Parser(__doc__)
PARSER.add_argument("--train", type=existing_file, help="a UTF-8 text to learn from")
PARSER.add_argument("--test", type=existing_file, help="a UTF-8 text to score")
PARSER.add_argument("--text", choices=("characters", "words"), default="characters", help="symbols (%(default)s)")
PARSER.add_argument("--output", type=new_path, help="a new CSV file, with a row for each reading")
PARSER.add_argument("--draw", type=Path, nargs=2, metavar=("CSV", "PNG"), help="the recipe's rows of a file as curves")
PARSER.add_argument("--contenders", choices=CONTENDERS, nargs="+", default=CONTENDERS, help="(all)")
PARSER.add_argument("--seeds", type=at_least_one, nargs="+", default=[1, 2, 3], help="(1 2 3)")
PARSER.add_argument("--steps", type=at_least_one, default=2000, help="of training (%(default)s)")
PARSER.add_argument(
    "--times", type=float, nargs="+", default=[0, 1, 2, 4, 8, 32], help="lengths over M (0 1 2 4 8 32)"
)
PARSER.add_argument("--tokens", type=at_least_one, default=25_600, help="of the test text (%(default)s)")


def check(options):
    """Raise a ValueError unless there is something to train on, or to draw."""
    if options.draw is None and None in (options.train, options.test, options.output):
        raise ValueError("give --train, --test and --output, or --draw")


if __name__ == "__main__":
    PARSER.refuse_first(check)

import csv
import functools
import itertools
import math
from collections import Counter

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from txl_hf import TokenStream, TransfoXLForCausalLM, evaluate_language_model
from txl_hf.memories import latest_states, memory_of
from txl_hf.transfo_xl import attention_transfo_xl as attention

L = 64
SIZES = {
    # M, rows, learning rate, and the model
    "characters": (64, 12, 3e-3, {"width": 128, "n_layer": 4, "d_inner": 512}),
    "words": (128, 16, 2e-3, {"width": 192, "n_layer": 4, "d_inner": 768, "dropout": 0.1, "div_val": 2}),
}


def smoke(folder: Path) -> list[str | Path]:
    text = common.standard_library("argparse")
    for name, part in (("train", text[:-8000]), ("test", text[-8000:])):
        (folder / name).write_text(part, encoding="utf-8")
    sizes = ["--steps", "40", "--seeds", "1", "--times", "0", "1", "4", "--tokens", "6400"]
    return ["--train", folder / "train", "--test", folder / "test", "--output", folder / "rows.csv", *sizes]


def read(options) -> tuple[dict[str, Tensor], int]:
    """The ids of both texts, and the size of the vocabulary: all characters, or the words of the training text."""

    def symbols(path: Path) -> list[str]:
        text = common.read_text(path)
        return list(text) if options.text == "characters" else text.replace("\n", " <eos> ").split()

    texts = {"train": symbols(options.train), "test": symbols(options.test)}
    words = [word for word, _ in Counter(texts["train"]).most_common()]
    found = words if options.text == "words" else sorted({*texts["train"], *texts["test"]})
    ids = {symbol: index for index, symbol in enumerate(found)}
    # A word that the training text lacks counts as its rarest one.
    numbers = {name: torch.tensor([ids.get(symbol, len(ids) - 1) for symbol in text]) for name, text in texts.items()}
    return numbers, len(ids)


def attend(inputs: attention.AttentionInputs, trained: int | None) -> tuple[Tensor, Tensor]:
    """The scaled scores of queries that see more than `trained` keys; with None a sink."""
    K, n = inputs.key.shape[2], inputs.query.shape[2]
    query = attention.add_bias(inputs.query, inputs.content_bias) * inputs.scaling
    by_distance = attention.position_scores(inputs)
    assert by_distance is not None
    scores = query @ inputs.key.transpose(-1, -2) + by_distance
    if trained is not None:
        keys = torch.arange(K - n + 1, K + 1, dtype=scores.dtype)
        scores = scores * (keys.log() / math.log(trained)).clamp(min=1)[:, None]
    scores = attention.hide(scores, inputs)
    beside = scores.new_zeros(*scores.shape[:-1], int(trained is None))
    probabilities = torch.cat([scores, beside], -1).softmax(-1)[..., :K]
    return probabilities @ inputs.value, probabilities


def train(model: TransfoXLForCausalLM, ids: Tensor, contender: str, options, seed: int) -> None:
    M, rows, rate, _ = SIZES[options.text]
    stream, chance = TokenStream(ids, L, rows), np.random.default_rng(seed)
    groups: list[dict] = [{"params": [], "weight_decay": decay} for decay in (0.0, 0.01)]
    for weight in model.parameters():
        groups[weight.dim() > 1]["params"].append(weight)
    optimizer = torch.optim.AdamW(groups, rate, betas=(0.9, 0.98), fused=True)
    warm_up = min(100, options.steps // 2)

    def schedule(step: int) -> float:
        done = max(0, step - warm_up) / (options.steps - warm_up)
        return min(1, (step + 1) / warm_up) * (1 + math.cos(math.pi * done)) / 2

    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    memory: dict = {}
    model.train()
    # A generator of its own, because a loader draws a seed at each pass, which would move the draws of dropout.
    loader = DataLoader(stream, batch_size=rows, generator=torch.Generator())
    for step, batch in zip(
        range(options.steps), itertools.chain.from_iterable(itertools.repeat(loader)), strict=False
    ):
        # The text begins anew.
        memory = {} if step % stream.steps == 0 else memory
        if contender == "drawn":
            memory = latest_states(memory, int(chance.integers(1, M + 1)))
        if contender == "clamped":
            model.clamp_len = int(chance.integers(M // 4, M + 1)) if chance.random() < 0.5 else -1
        outputs = model(**batch, **memory)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        memory = memory_of(outputs)
    model.clamp_len = -1


def draw(source: Path, path: Path):
    """Perplexity over that at the length of training, by the memory's length over it; seeds as thin lines."""
    import matplotlib.pyplot as plt

    with source.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["reading"].startswith("recipe")]
    panels = list(dict.fromkeys(row["text"] for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.8), layout="constrained", squeeze=False)
    for axis, text in zip(axes[0], panels, strict=True):
        M = SIZES[text][0]
        losses = {
            (row["reading"], row["seed"], int(row["memory_length"]) / M): float(row["nll"])
            for row in rows
            if row["text"] == text
        }
        shown = {
            "recipe": "as trained",
            "recipe, clamp_len": f"clamp_len={M}",
            "recipe, decay_len": f"decay_len={M + L}",
        }
        for color, reading in zip(("C3", "C1", "C0"), shown, strict=True):
            for number, seed in enumerate(dict.fromkeys(seed for _, seed, _ in losses)):
                own = {times: nll for (name, of, times), nll in losses.items() if (name, of) == (reading, seed)}
                points = [
                    (times, math.exp(own[times] - losses["recipe", seed, 1.0])) for times in sorted(own) if times >= 1
                ]
                label = shown[reading] if number == 0 else None
                axis.plot(*zip(*points, strict=True), color=color, marker="o", alpha=0.7, label=label)
        axis.set(xscale="log", xlabel=f"memory length, as a multiple of training's {M}", title=text)
        ticks = sorted({key[2] for key in losses} - {0.0})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0, 0].set_ylabel("perplexity over that at the length of training")
    figure.savefig(path, dpi=150)


def main():
    options = common.parse_arguments(PARSER, smoke)
    if options.draw is not None:
        return draw(*options.draw)
    torch.set_num_threads(1)
    (texts, vocab_size), (M, _, _, sizes) = read(options), SIZES[options.text]
    sizes = sizes | {"cutoffs": [size for size in (2000, 10000) if options.text == "words" and size < vocab_size]}
    for name, trained in (("scaled", M + L), ("sink", None)):
        attention.register(attention.Backend(name, functools.partial(attend, trained=trained)))
    scored = {"token_ids": texts["test"][: options.tokens + 1], "segment_length": L, "batch_size": 2}
    scored["warm_up"] = options.tokens // 6 // L * L
    rows = []
    for contender, seed in itertools.product(options.contenders, options.seeds):
        torch.manual_seed(seed)
        config = common.small_config(vocab_size, mem_len=M, tgt_len=L, init_std=0.05, proj_init_std=0.05, **sizes)
        model, own = TransfoXLForCausalLM(config), "sink" if contender == "sink" else "eager"
        model.set_attn_implementation(own)
        started = time.process_time()
        train(model, texts["train"], contender, options, seed)
        seconds = round(time.process_time() - started)
        readings = {contender: (-1, -1, own), f"{contender}, decay_len": (-1, M + L, own)}
        if contender == "recipe":
            readings |= {"recipe, clamp_len": (M, -1, own), "recipe, scores scaled": (-1, -1, "scaled")}
        for reading, (model.clamp_len, model.config.decay_len, backend) in readings.items():
            model.set_attn_implementation(backend)
            for length in (round(times * M) for times in options.times):
                nll = evaluate_language_model(model, memory_length=length, **scored).nll
                settings = {"text": options.text, "steps": options.steps, "reading": reading, "seed": seed}
                figures = {"memory_length": length, "nll": f"{nll:.4f}", "training_seconds": seconds}
                rows.append(settings | figures)
                print(*rows[-1].values(), flush=True)
    common.write_rows(options.output, rows)


if __name__ == "__main__":
    main()
