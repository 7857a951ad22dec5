"""A page to see a memory at work: a text continued, what the memory is worth at each token, where each head looks.

    pip install gradio "txl-hf[train]"
    python examples/space/app.py demo-output

This folder is ready to be a Space of the Hub: README.md says so in its first lines, requirements.txt what it needs;
set the variable MODEL to the name of a model there.
"""

import os
import sys
from collections.abc import Iterator
from threading import Thread

import gradio as gr
import matplotlib
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import txl_hf  # registers Transformer-XL with the Auto classes

matplotlib.use("Agg")

# Characters of a text that are read: a page should answer within seconds.
LONGEST = 4_000
# Tokens of the end of a text for which heads are shown, and how far back.
QUERIES, KEYS = 24, 96


class Page:
    """What the page shows, each as a function of a text."""

    def __init__(self, name: str):
        self.model = AutoModelForCausalLM.from_pretrained(name).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.config = self.model.config

    def read(self, text: str) -> list[int]:
        ids = self.tokenizer(text[-LONGEST:])["input_ids"]
        if len(ids) < 2:
            raise gr.Error("Write a little more: there is nothing to go on from.")
        return ids

    def write(self, text: str, tokens: int, temperature: float) -> Iterator[str]:
        """The text, longer and longer."""
        ids = torch.tensor([self.read(text)])
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True)
        choice = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": int(tokens), "streamer": streamer}
        writer = Thread(target=self.model.generate, args=(ids,), kwargs=settings | choice)
        writer.start()
        for piece in streamer:
            text += piece
            yield text
        writer.join()

    def worth(self, text: str) -> tuple[list[tuple[str, float]], list[tuple[str, float]], str]:
        """Each token with its loss in bits: with memory, without; and what both come to."""
        ids = self.read(text)
        segment = min(self.config.tgt_len, max(1, len(ids) // 4))
        found = [txl_hf.token_losses(self.model, ids, segment, length) for length in (self.config.mem_len, 0)]
        bits = [losses / torch.log(torch.tensor(2.0)) for losses in found]
        pieces = [self.tokenizer.decode([token]) for token in ids[1:]]
        coloured = [list(zip(pieces, map(float, losses / 10), strict=True)) for losses in bits]
        said = (
            f"{bits[0].mean():.3f} bits a token with a memory of {self.config.mem_len}, {bits[1].mean():.3f} without, "
            f"in segments of {segment}. The darker, the less expected: black is 10 bits and more."
        )
        return coloured[0], coloured[1], said

    def look(self, text: str, layer: int) -> Figure:
        """Where the heads of a layer look, from each of the last tokens."""
        ids = self.read(text)[-(QUERIES + self.config.mem_len) :]
        past, now = torch.tensor([ids[:-QUERIES]]), torch.tensor([ids[-QUERIES:]])
        with torch.no_grad():
            mems = self.model(past, use_cache=False).mems if past.shape[1] else None
            attentions = self.model(now, mems=mems, output_attentions=True, use_cache=False).attentions
        heads = attentions[int(layer)][0][..., -KEYS:]
        figure = Figure(figsize=(8, 1.2 + 1.3 * len(heads)), layout="constrained")
        for head, (axes, weights) in enumerate(
            zip(figure.subplots(len(heads), squeeze=False)[:, 0], heads, strict=True)
        ):
            axes.imshow(weights.sqrt(), aspect="auto", cmap="magma", vmin=0, extent=(-weights.shape[1], 0, QUERIES, 0))
            axes.set_ylabel(f"head {head}")
            axes.set_yticks([])
            axes.axvline(-now.shape[1], color="white", linewidth=0.5)
        axes.set_xlabel("tokens back from the end; left of the line: the memory")
        return figure


def build(page: Page) -> gr.Blocks:
    with gr.Blocks(title="Transformer-XL") as app:
        gr.Markdown("# Transformer-XL\nA text, what the memory is worth in it, and where each head looks.")
        text = gr.Textbox(label="text", lines=8, value="def main(argv=None):\n    ")
        with gr.Tab("Continue"):
            tokens = gr.Slider(1, 400, 100, step=1, label="tokens")
            temperature = gr.Slider(0, 1.5, 0.7, label="temperature (0: the most probable token)")
            gr.Button("Continue", variant="primary").click(page.write, [text, tokens, temperature], text)
        with gr.Tab("What the memory is worth"):
            said = gr.Markdown()
            shown = [gr.HighlightedText(label=label, show_legend=False) for label in ("with memory", "without")]
            gr.Button("Read", variant="primary").click(page.worth, text, [*shown, said])
        with gr.Tab("Where heads look"):
            layer = gr.Slider(0, page.config.n_layer - 1, 0, step=1, label="layer")
            picture = gr.Plot()
            gr.Button("Look", variant="primary").click(page.look, [text, layer], picture)
    return app


if __name__ == "__main__":
    build(Page(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("MODEL", "demo-output"))).launch()
