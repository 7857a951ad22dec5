"""A page to see a memory at work: a text continued, what the memory is worth at each token, where each head looks.

    pip install gradio ".[train]"
    python examples/space/app.py demo-output

This folder is ready to be a Space of the Hub: README.md says so in its first lines, requirements.txt what it needs;
set the variable MODEL to the name of a model there. While txl-hf is on no index, put the wheel there too that
`pip wheel --no-deps .` makes in a clone, and write its file name for `txl-hf` in requirements.txt.
"""

import argparse
import html
import os
from collections.abc import Iterator
from threading import Thread

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import txl_hf  # registers Transformer-XL with the Auto classes
from txl_hf.command_line import CommandParser, hub_or_folder, one_line_errors

with one_line_errors():
    import gradio as gr
    import matplotlib
    from matplotlib.figure import Figure

matplotlib.use("Agg")

# Characters of a text that are read: a page should answer within seconds.
LONGEST = 4_000
# Bits of a token that is coloured as darkly as can be.
MOST_BITS = 8
# Tokens that are decoded to see what the last of them adds.
LOOK_BACK = 9
# Tokens of the end of a text for which heads are shown, and how far back.
QUERIES, KEYS = 24, 96


class Page:
    """The outputs of the page, each as a function of a text."""

    def __init__(self, name: str):
        self.model = AutoModelForCausalLM.from_pretrained(name).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.config = self.model.config

    def read(self, text: str) -> list[int]:
        try:
            ids = self.tokenizer(text[-LONGEST:])["input_ids"]
        except ValueError as error:
            # It has no token for a symbol.
            raise gr.Error(str(error)) from None
        if len(ids) < 2:
            raise gr.Error("Write a little more: there is nothing to go on from.")
        return ids

    def go_on(self, text: str, tokens: int, temperature: float) -> Iterator[str]:
        """A continuation of the text, longer at each step."""
        ids = torch.tensor([self.read(text)])
        # With the text, behind which a decoder of words puts a space; alone they would have none.
        streamer, read = TextIteratorStreamer(self.tokenizer), len(self.tokenizer.decode(ids[0]))
        choice = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": int(tokens), "streamer": streamer}
        failed = []

        def generate():
            try:
                self.model.generate(ids, **settings, **choice)
            except Exception as error:
                # Whatever it is, nobody would hear of it, and the page would wait for more. What is left may not
                # decode.
                failed.append(error)
                streamer.on_finalized_text("", stream_end=True)

        writer = Thread(target=generate)
        writer.start()
        written = ""
        for piece in streamer:
            written += piece
            yield written[read:]
        writer.join()
        if failed:
            raise gr.Error(str(failed[0]))

    def write(self, text: str, tokens: int, temperature: float) -> Iterator[str]:
        """The text with what may follow it, longer and longer."""
        for written in self.go_on(text, tokens, temperature):
            yield text + written

    def worth(self, text: str) -> tuple[str, str, str]:
        """The scores of both readings, and each token coloured by its loss: with memory, without."""
        ids = self.read(text)
        segment = min(self.config.tgt_len, max(1, len(ids) // 4))
        found = [txl_hf.token_losses(self.model, ids, segment, length) for length in (self.config.mem_len, 0)]
        with_memory, without = (losses / torch.log(torch.tensor(2.0)) for losses in found)
        said = (
            f"**{with_memory.mean():.3f}** bits a token with a memory of {self.config.mem_len}, "
            f"**{without.mean():.3f}** without, in segments of {segment}. The redder, the less expected; point at a "
            "token to see its bits."
        )
        pieces = [self.added(ids[:end]) for end in range(1, len(ids) + 1)]
        return said, self.coloured("with memory", pieces, with_memory), self.coloured("without", pieces, without)

    def added(self, ids: list[int]) -> str:
        """The characters that the last token adds: also the space before a word; none while a character is begun."""
        before, text = (
            self.tokenizer.decode(part).rstrip("\ufffd") for part in (ids[-LOOK_BACK:-1], ids[-LOOK_BACK:])
        )
        return text[len(before) :]

    def coloured(self, title: str, pieces: list[str], bits: torch.Tensor) -> str:
        """The text behind its first token as HTML, its lines and columns as they are."""
        first = html.escape(pieces[0])
        tokens = (
            f'<span title="{value:.2f} bits" style="background: rgba(220, 40, 40, {min(1, value / MOST_BITS):.2f})">'
            f"{html.escape(piece)}</span>"
            for piece, value in zip(pieces[1:], bits.tolist(), strict=True)
        )
        style = "white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; line-height: 1.5"
        return f'<h4>{title}</h4><div style="{style}">{first}{"".join(tokens)}</div>'

    def look(self, text: str, layer: int) -> Figure:
        """Where the heads of a layer look, from each of the last tokens."""
        ids = self.read(text)[-(QUERIES + self.config.mem_len) :]
        past, now = torch.tensor([ids[:-QUERIES]]), torch.tensor([ids[-QUERIES:]])
        with torch.no_grad():
            # Of all that it read, also where a model remembers only what is not read again.
            whole = txl_hf.MemoryLengths(ext_len=0)
            mems = self.model(past, use_cache=False, lengths=whole).mems if past.shape[1] else None
            attentions = self.model(now, mems=mems, output_attentions=True, use_cache=False).attentions
        heads = attentions[int(layer)][0][..., -KEYS:]
        figure = Figure(figsize=(8, 1.2 + 1.3 * len(heads)), layout="constrained")
        plots = figure.subplots(len(heads), squeeze=False, sharex=True)[:, 0]
        for head, (axes, weights) in enumerate(zip(plots, heads, strict=True)):
            axes.imshow(weights.sqrt(), aspect="auto", cmap="magma", vmin=0, extent=(-weights.shape[1], 0, QUERIES, 0))
            axes.set_ylabel(f"head {head}")
            axes.set_yticks([])
            axes.axvline(-now.shape[1], color="white", linewidth=0.5)
        axes.set_xlabel("tokens back from the end; left of the line: the memory")
        return figure


def build(page: Page) -> gr.Blocks:
    with gr.Blocks(title="Transformer-XL") as app:
        gr.Markdown("# Transformer-XL\nA text, what the memory is worth in it, and where each head looks.")
        text = gr.Textbox(label="text", lines=6, value="def main(argv=None):\n    ")
        # Short names: a telephone shows as many as fit.
        with gr.Tab("Continue"):
            following = gr.Textbox(label="how it may go on, as you type", lines=3, interactive=False)
            with gr.Row():
                tokens = gr.Slider(1, 400, 60, step=1, label="tokens")
                temperature = gr.Slider(0, 1.5, 0.7, label="temperature")
            gr.Button("Continue", variant="primary").click(page.write, [text, tokens, temperature], text)
            text.input(
                page.go_on,
                [text, tokens, temperature],
                following,
                show_progress="hidden",
                trigger_mode="always_last",
            )
        with gr.Tab("Memory"):
            read = gr.Button("What is the memory worth?", variant="primary")
            read.click(page.worth, text, [gr.Markdown(), gr.HTML(), gr.HTML()])
        with gr.Tab("Heads"):
            last = page.config.n_layer - 1
            layer = gr.Slider(0, last, 0, step=1, label="layer") if last else gr.State(0)
            look = gr.Button("Where do its heads look?", variant="primary")
            look.click(page.look, [text, layer], gr.Plot(show_label=False))
    return app


if __name__ == "__main__":
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("MODEL", "demo-output")
    parser.add_argument(
        "model", type=hub_or_folder, nargs="?", default=default, help="folder or Hub name (%(default)s)"
    )
    options = parser.parse_args()
    with one_line_errors():
        build(Page(options.model)).launch()
