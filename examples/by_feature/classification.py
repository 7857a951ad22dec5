"""Fine-tune a checkpoint to classify texts, with plain `Trainer`.

    python examples/by_feature/classification.py --model demo-output --data reviews.csv --output classifier
    python examples/by_feature/classification.py --smoke

The data are a CSV file or one JSON object a line (.jsonl), with the columns `text` and `label`. What is added to a
checkpoint: a linear classifier on the last real token of a text. Texts are padded together, and the attention mask
keeps the padding out. The output folder works with `pipeline("text-classification")`.
"""

import argparse
import ast
import csv
import json
from pathlib import Path
from typing import TextIO

import common
from txl_hf.command_line import at_least_one, existing_file, hub_or_folder, new_path, one_line_errors, positive

PARSER = common.Parser(__doc__)
PARSER.add_argument("--model", type=hub_or_folder, required=True, help="a checkpoint: a folder, or a name on the Hub")
PARSER.add_argument(
    "--data", type=existing_file, required=True, help="text and label: .csv or .jsonl; a fifth is held out"
)
PARSER.add_argument("--output", type=new_path, required=True, help="a new folder for the classifier")
PARSER.add_argument("--max_length", type=at_least_one, default=512, help="tokens read of a text (%(default)s)")
PARSER.add_argument("--epochs", type=positive, default=3, help="(%(default)s)")
PARSER.add_argument("--batch_size", type=at_least_one, default=16, help="texts in a step (%(default)s)")
PARSER.add_argument("--learning_rate", type=positive, default=1e-4, help="(%(default)s)")

if __name__ == "__main__":
    PARSER.refuse_first()

import numpy as np
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

from txl_hf.files import whole_folder

with one_line_errors():
    import pandas
    from datasets import ClassLabel, Dataset, DatasetDict


def smoke(folder: Path) -> list[str | Path]:
    """Docstrings and bodies of Python's functions, to be told apart."""
    with (folder / "data.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for name in ("argparse", "inspect", "pathlib", "shutil", "statistics"):
            for node in ast.walk(ast.parse(common.standard_library(name))):
                if isinstance(node, ast.FunctionDef) and (prose := ast.get_docstring(node)) and len(node.body) > 1:
                    writer.writerow([prose, "prose"])
                    writer.writerow(["\n".join(ast.unparse(statement) for statement in node.body[1:]), "code"])
    sizes = ["--max_length", "64", "--epochs", "4", "--learning_rate", "3e-3"]
    return [
        "--model",
        common.tiny_checkpoint(folder),
        "--data",
        folder / "data.csv",
        "--output",
        folder / "output",
        *sizes,
    ]


def main():
    arguments = common.parse_arguments(PARSER, smoke)
    # The classifier's weights are drawn before Trainer takes a seed.
    set_seed(0)
    with one_line_errors():
        data = read(arguments.data)
        names = data["train"].features["label"].names
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        model, tokenizer = common.load(AutoModelForSequenceClassification, arguments.model, **labels)
        # Which token fills up does not matter: the attention mask says that it is none.
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
        tokenized = data.map(
            lambda texts: tokenizer(texts["text"], truncation=True, max_length=arguments.max_length), batched=True
        )
    print(f"{len(data['train'])} texts to train on, {len(data['test'])} held out; labels {', '.join(names)}.")

    with whole_folder(arguments.output) as folder:
        trainer = Trainer(
            model,
            training_arguments(arguments, folder),
            data_collator=DataCollatorWithPadding(tokenizer),
            train_dataset=tokenized["train"],
            eval_dataset=tokenized["test"],
            processing_class=tokenizer,
            compute_metrics=accuracy,
        )
        trainer.train()
        metrics = trainer.evaluate()
        trainer.save_model(folder)
    commonest = np.bincount(data["test"]["label"]).max() / len(data["test"])
    print(f"Held-out accuracy {metrics['eval_accuracy']:.1%}; always the commonest label: {commonest:.1%}.")
    classifier = pipeline("text-classification", str(arguments.output), device=model.device)
    example = data["test"][0]["text"]
    print(f"{classifier(example, truncation=True, max_length=arguments.max_length)[0]}: {example[:60]!r}")


def read(path: Path) -> DatasetDict:
    """The texts, with labels as numbers; a fifth of them, drawn at random, to test."""
    kind, read_as = ("CSV", read_csv) if path.suffix.lower() == ".csv" else ("JSON lines", read_json_lines)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            frame = read_as(file)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as {kind}: {error}") from error
    if missing := {"text", "label"} - set(frame.columns):
        raise ValueError(f"{path} has no column {' and no column '.join(sorted(missing))}")
    rows = len(frame)
    frame = frame[["text", "label"]].dropna().astype(str)
    frame = frame[(frame["text"].str.strip() != "") & (frame["label"] != "")]
    if len(frame) < rows:
        print(f"{rows - len(frame)} of {rows} rows are left out: they have no text, or no label.")
    names = sorted(set(frame["label"]))
    if len(names) < 2 or len(frame) < 10:
        raise ValueError(f"{path} has {len(frame)} texts and {len(names)} labels: at least 10 and 2 are needed")
    data = Dataset.from_pandas(frame, preserve_index=False).cast_column("label", ClassLabel(names=names))
    return data.train_test_split(0.2, seed=0)


def read_csv(file: TextIO) -> pandas.DataFrame:
    """Its rows as they are written, where pandas takes the label None for none, 01 for 1, and moves all columns by one
    for a comma too many."""
    # A text may be longer than what the module takes for a slip.
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(file, strict=True)
    try:
        header, rows = next(reader, []), []
        for fields in filter(None, reader):
            if len(fields) != len(header):
                quotes = ": what has a comma in it needs quotes" if len(fields) > len(header) else ""
                raise ValueError(
                    f"line {reader.line_num} ends a row of {len(fields)}, not {len(header)} fields{quotes}"
                )
            rows.append(fields)
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error
    if twice := [name for name in header if header.count(name) > 1]:
        raise ValueError(f"two columns are called {twice[0]}")
    return pandas.DataFrame(rows, columns=header, dtype=object)


def read_json_lines(file: TextIO) -> pandas.DataFrame:
    rows = []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict) or any(isinstance(row.get(name), list | dict) for name in ("text", "label")):
            raise ValueError(f"line {number} is no object whose text and label are a string or a number each")
        rows.append(row)
    return pandas.DataFrame(rows, dtype=object)


def training_arguments(arguments: argparse.Namespace, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        num_train_epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        save_strategy="no",
        report_to=[],
    )


def accuracy(predicted: EvalPrediction) -> dict[str, float]:
    return {"accuracy": np.mean(predicted.predictions.argmax(-1) == predicted.label_ids)}


if __name__ == "__main__":
    main()
