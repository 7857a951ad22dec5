"""Fine-tune a checkpoint on documents that have nothing to do with one another, packed: no token is padding.

    python examples/by_feature/document_resets.py --model demo-output --documents letters/*.txt --output letters-model
    python examples/by_feature/document_resets.py --smoke

What is added to training with memory is one argument. The documents are joined to one text, and `document_end` tells
`TokenStream` where each ends: its items then have `resets`, and the model sees nothing before the document that it is
in, be it in the memory or earlier in the segment. The script shows that held-out documents, read together, cost what
each of them costs alone, and what they cost without resets. Then it times packing beside the padding that it saves,
where segments end with documents and rows that have less to read are padded; `--row` appends the figures to a file.
"""

import argparse
import ast
import csv
import datetime
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import common
from txl_hf.command_line import at_least_one, existing_file, hub_or_folder, new_path, one_line_errors, positive

PARSER = common.Parser(__doc__)
PARSER.add_argument("--model", type=hub_or_folder, required=True, help="a checkpoint: a folder, or a name on the Hub")
PARSER.add_argument(
    "--documents", type=existing_file, nargs="+", required=True, help="UTF-8 texts; a fourth of them is held out"
)
PARSER.add_argument("--output", type=new_path, required=True, help="a new folder for the model")
PARSER.add_argument("--segment_length", type=at_least_one, help="by default the checkpoint's")
PARSER.add_argument("--batch_size", type=at_least_one, default=8, help="streams read in parallel (%(default)s)")
PARSER.add_argument("--epochs", type=at_least_one, default=3, help="(%(default)s)")
PARSER.add_argument("--learning_rate", type=positive, default=1e-4, help="(%(default)s)")
PARSER.add_argument("--rounds", type=at_least_one, default=3, help="of timing; the best one counts (%(default)s)")
PARSER.add_argument("--row", type=Path, help="CSV file that the speeds are appended to")

if __name__ == "__main__":
    PARSER.refuse_first()

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, TrainingArguments, set_seed

from txl_hf import TokenStream, TransfoXLTrainer, token_losses
from txl_hf.data.texts import encode_text
from txl_hf.files import whole_folder
from txl_hf.memories import memory_of


def smoke(folder: Path) -> list[str | Path]:
    source = common.standard_library("statistics")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)][:9]
    for node in functions:
        (folder / f"{node.name}.txt").write_text(ast.get_source_segment(source, node) or "", encoding="utf-8")
    paths = [folder / f"{node.name}.txt" for node in functions]
    sizes = ["--batch_size", "3", "--epochs", "1", "--learning_rate", "1e-3", "--rounds", "1"]
    model = common.tiny_checkpoint(folder)
    return ["--model", model, "--output", folder / "output", *sizes, "--documents", *paths]


def pack(documents: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The documents as one text, and the places where they end."""
    return torch.cat(documents), torch.tensor([len(document) for document in documents]).cumsum(0).tolist()


def train(model, documents: list[Tensor], segment_length: int, arguments: argparse.Namespace, scratch: Path):
    text, ends = pack(documents)
    settings = TrainingArguments(
        str(scratch),
        per_device_train_batch_size=arguments.batch_size,
        num_train_epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        max_grad_norm=0.25,
        save_strategy="no",
        report_to=[],
    )
    stream = TokenStream(text, segment_length, arguments.batch_size, document_end=ends)
    TransfoXLTrainer(model, settings, train_dataset=stream).train()


def cost(model, documents: list[Tensor], segment_length: int, resets: bool = True) -> Tensor:
    """Bits per token of each document, read together, (documents,). The first token of a document is not counted.

    With `same_length` a token sees as many before it wherever segments end, which is not where documents do.
    """
    text, ends = pack(documents)
    losses = token_losses(model, text, segment_length, same_length=True, document_end=ends if resets else None)
    # There is none for the very first token.
    parts = torch.cat([losses.new_zeros(1), losses]).split([len(document) for document in documents])
    return torch.stack([part[1:].mean() for part in parts]) / math.log(2)


# --- the padding that is saved ---------------------------------------------------------------------------------------


def segments(documents: list[Tensor], segment_length: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """The padding that is compared: documents in `batch_size` rows, one after the other in each, in segments that end
    where documents end.

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


def with_memory_columns(batch: dict[str, Tensor], memory: dict) -> dict[str, Tensor]:
    """The arguments of a call, of a batch of `segments`: a row that starts a document sees nothing of its memory."""
    mask = batch["attention_mask"]
    if memory:
        remember = (~batch["starts"]).long()[:, None].expand(-1, memory["mems"][0].shape[1])
        mask = torch.cat([remember, mask], dim=1)
    return {"input_ids": batch["input_ids"], "shift_labels": batch["shift_labels"], "attention_mask": mask}


def packed(documents: list[Tensor], segment_length: int, batch_size: int) -> Iterable[dict[str, Tensor]]:
    text, ends = pack(documents)
    stream = TokenStream(text, segment_length, batch_size, keep_remainder=True, document_end=ends)
    return DataLoader(stream, batch_size=batch_size)


def tokens_per_second(model, batches: Iterable[dict[str, Tensor]], inputs_of: Callable[[dict, dict], dict]) -> float:
    """Of forward and backward; padding is not counted."""
    memory: dict = {}
    tokens, started = torch.zeros((), dtype=torch.long), time.perf_counter()
    for batch in batches:
        inputs = {name: tensor.to(model.device) for name, tensor in inputs_of(batch, memory).items()}
        outputs = model(**inputs, **memory)
        outputs.loss.backward()
        model.zero_grad()
        memory = memory_of(outputs)
        tokens += (batch["shift_labels"] != -100).sum()
    return int(tokens) / (time.perf_counter() - started)


def compare(model, documents: list[Tensor], segment_length: int, batch_size: int, rounds: int) -> dict[str, float]:
    """The best of some rounds of each way, one after the other, because a machine has other things to do too."""
    model.train()
    sizes, found = (documents, segment_length, batch_size), {"packed": 0.0, "padded": 0.0}
    for _ in range(rounds):
        speeds = {
            "packed": tokens_per_second(model, packed(*sizes), lambda batch, memory: batch),
            "padded": tokens_per_second(model, segments(*sizes), with_memory_columns),
        }
        found = {way: max(speed, speeds[way]) for way, speed in found.items()}
    return found


def append_row(path: Path, figures: dict):
    """With the hardware and the day."""
    cpu = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1] for line in cpu.read_text().splitlines() if "model name" in line] if cpu.exists() else []
    )
    hardware = f"{names[0].strip()} × {len(names)}" if names else platform.processor()
    origin = {"date": datetime.date.today(), "hardware": hardware, "threads": torch.get_num_threads()}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*origin, *figures])
        if new:
            writer.writeheader()
        writer.writerow(origin | figures)


def main():
    arguments = common.parse_arguments(PARSER, smoke)
    set_seed(0)
    with one_line_errors():
        texts = [common.read_text(path) for path in arguments.documents]
        # A document starts from nothing; the zeros of legacy checkpoints would have to stand before each.
        model, tokenizer = common.load(AutoModelForCausalLM, arguments.model, initial_memory="empty")
        documents = [torch.from_numpy(encode_text(tokenizer, text)) for text in texts]
        for path, document in zip(arguments.documents, documents, strict=True):
            if len(document) < 2:
                raise ValueError(f"{path} is too short: {len(document)} token, and the first is never predicted")
        if len(documents) < 2:
            raise ValueError("one of the --documents is held out and none is left to train on: give more")
        held_out, documents = documents[::4], [ids for i, ids in enumerate(documents) if i % 4]
    segment_length = arguments.segment_length or model.config.tgt_len

    with whole_folder(arguments.output) as folder, one_line_errors():
        train(model, documents, segment_length, arguments, folder)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    model.eval()
    alone = torch.cat([cost(model, [document], segment_length) for document in held_out])
    together = cost(model, held_out, segment_length)
    leaking = cost(model, held_out, segment_length, resets=False)
    print(f"Bits per token of {len(held_out)} held-out documents, each with the same weight:")
    print(f"  {alone.mean():.4f} read alone, one after the other")
    print(
        f"  {together.mean():.4f} read together; no document differs by more than {(together - alone).abs().max():.0e}"
    )
    difference = (leaking - together).abs().max()
    print(f"  {leaking.mean():.4f} read together without resets, up to {difference:.1e} off")
    speeds = compare(model, documents, segment_length, arguments.batch_size, arguments.rounds)
    print(f"Tokens a second of training: {speeds['packed']:.0f} packed, {speeds['padded']:.0f} padded")
    if arguments.row is not None:
        lengths = torch.tensor([len(document) for document in documents]).double()
        sizes = {
            "documents": len(documents),
            "mean_tokens": round(lengths.mean().item()),
            "parameters": model.num_parameters(),
        }
        sizes |= {"segment_length": segment_length, "batch_size": arguments.batch_size}
        rounded = {f"{way}_tokens_per_second": round(speed) for way, speed in speeds.items()}
        append_row(arguments.row, sizes | rounded | {"gain": round(speeds["packed"] / speeds["padded"], 2)})


if __name__ == "__main__":
    main()
