"""Fine-tune a checkpoint on documents that have nothing to do with one another: each starts without memory.

    python examples/by_feature/document_resets.py --model demo-output --documents letters/*.txt --output letters-model
    python examples/by_feature/document_resets.py --smoke

What is added to training with memory: rows of a batch read one document after the other, and where a row begins one,
the memory columns of its `attention_mask` are 0, so that it starts afresh while other rows go on. A boundary within a
segment does not occur, because segments are cut where documents end: a row that has less to read is padded on its
right, and as its next segment starts afresh, the padding never lies between a text and its memory. The script shows
that held-out documents then cost what each of them costs alone, and what they cost when the memory is not reset.
"""

import argparse
import ast
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, set_seed

import common
from txl_hf import evaluate_language_model
from txl_hf.command_line import one_line_errors
from txl_hf.encoding import encode_text
from txl_hf.memory_transfo_xl import memory_of

PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("--model", required=True, help="a checkpoint: a folder, or a name on the Hub")
PARSER.add_argument(
    "--documents", type=Path, nargs="+", required=True, help="UTF-8 texts; a fourth of them is held out"
)
PARSER.add_argument("--output", type=Path, required=True, help="a new folder for the model")
PARSER.add_argument("--segment-length", type=int, help="by default the checkpoint's")
PARSER.add_argument("--batch-size", type=int, default=8, help="documents read in parallel (%(default)s)")
PARSER.add_argument("--epochs", type=int, default=3, help="(%(default)s)")
PARSER.add_argument("--learning-rate", type=float, default=1e-4, help="(%(default)s)")


def smoke(folder: Path) -> list[str | Path]:
    source = common.standard_library("statistics")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for node in functions:
        (folder / f"{node.name}.txt").write_text(ast.get_source_segment(source, node) or "", encoding="utf-8")
    paths = [folder / f"{node.name}.txt" for node in functions]
    sizes = ["--batch-size", "3", "--epochs", "1", "--learning-rate", "1e-3"]
    model = common.tiny_checkpoint(folder)
    return ["--model", model, "--output", folder / "output", *sizes, "--documents", *paths]


def segments(documents: list[Tensor], segment_length: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Read documents in `batch_size` rows, one after the other in each, in segments that end where documents end.

    Yields:
        input_ids and shift_labels, (B, L), with -100 for what is padding; attention_mask, (B, L); starts, (B,) bool,
        whether the segment is the first of its document; and document, (B,), which one it is, or -1 for none.
    """
    waiting = list(enumerate(documents))[::-1]
    rows: list[tuple[int, Tensor]] = [(-1, torch.zeros(0, dtype=torch.long))] * batch_size
    while True:
        # A document is read when its last token, which is a label only, is left.
        starts = torch.tensor([len(left) < 2 for _, left in rows])
        rows = [waiting.pop() if start and waiting else row for start, row in zip(starts, rows, strict=True)]
        if all(len(left) < 2 for _, left in rows):
            return
        pieces = [left[: segment_length + 1] for _, left in rows]
        labels = pad_sequence([piece[1:] for piece in pieces], batch_first=True, padding_value=-100)
        inputs = pad_sequence([piece[:-1] for piece in pieces], batch_first=True)
        yield {
            "input_ids": inputs,
            "shift_labels": labels,
            "attention_mask": (labels != -100).long(),
            "starts": starts,
            "document": torch.tensor([number if len(left) > 1 else -1 for number, left in rows]),
        }
        rows = [(number, left[segment_length:]) for number, left in rows]


def step(model, batch: dict[str, Tensor], memory: dict, reset: bool = True):
    """The model's outputs for a batch of `segments` that goes on from `memory`, the `memory_of` those before it."""
    mask = batch["attention_mask"]
    if memory:
        remember = ~batch["starts"] if reset else torch.ones_like(batch["starts"])
        mask = torch.cat([remember.long()[:, None].expand(-1, memory["mems"][0].shape[1]), mask], dim=1)
    inputs = {"input_ids": batch["input_ids"], "shift_labels": batch["shift_labels"], "attention_mask": mask}
    return model(**{name: tensor.to(model.device) for name, tensor in inputs.items()}, **memory)


def train(model, documents: list[Tensor], segment_length: int, arguments: argparse.Namespace):
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    model.train()
    bar = tqdm(total=arguments.epochs * sum(len(document) - 1 for document in documents), unit="token")
    for _ in range(arguments.epochs):
        memory: dict = {}
        shuffled = [documents[i] for i in torch.randperm(len(documents))]
        for batch in segments(shuffled, segment_length, arguments.batch_size):
            outputs = step(model, batch, memory)
            outputs.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
            memory = memory_of(outputs)
            bar.update(int(batch["attention_mask"].sum()))


@torch.no_grad()
def evaluate(model, documents: list[Tensor], segment_length: int, batch_size: int, reset: bool = True) -> Tensor:
    """Bits per token of each document, read together, (documents,)."""
    model.eval()
    memory: dict = {}
    bits = torch.zeros(len(documents))
    for batch in segments(documents, segment_length, batch_size):
        outputs = step(model, batch, memory, reset)
        memory, read = memory_of(outputs), batch["document"] >= 0
        bits.index_add_(0, batch["document"][read], outputs.losses.sum(1).cpu()[read] / math.log(2))
    return bits / torch.tensor([len(document) - 1 for document in documents])


def main():
    arguments = common.parse_arguments(PARSER, smoke)
    set_seed(0)
    with one_line_errors():
        common.check_output(arguments.output)
        texts = [common.read_text(path) for path in arguments.documents]
        # A document starts from nothing; the zeros of legacy checkpoints would have to be written into the memory.
        model, tokenizer = common.load(AutoModelForCausalLM, arguments.model, initial_memory="empty")
        documents = [torch.from_numpy(encode_text(tokenizer, text)) for text in texts]
        for path, document in zip(arguments.documents, documents, strict=True):
            if len(document) < 2:
                raise ValueError(f"{path} is too short: {len(document)} token, and the first is never predicted")
        if len(documents) < 2:
            raise ValueError("one of the --documents is held out and none is left to train on: give more")
        held_out, documents = documents[::4], [ids for i, ids in enumerate(documents) if i % 4]
    segment_length = arguments.segment_length or model.config.tgt_len
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())

    with common.whole_folder(arguments.output) as folder:
        train(model, documents, segment_length, arguments)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    sizes = (segment_length, arguments.batch_size)
    alone = torch.tensor([evaluate_language_model(model, ids, segment_length).bits_per_token for ids in held_out])
    together = evaluate(model, held_out, *sizes)
    leaking = evaluate(model, held_out, *sizes, reset=False)
    print(f"Bits per token of {len(held_out)} held-out documents, each with the same weight:")
    print(f"  {alone.mean():.4f} read alone, one after the other")
    print(
        f"  {together.mean():.4f} read together; no document differs by more than {(together - alone).abs().max():.0e}"
    )
    print(f"  {leaking.mean():.4f} read together without reset")


if __name__ == "__main__":
    main()
