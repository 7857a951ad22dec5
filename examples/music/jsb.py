"""Bach's chorales in quarter notes, nats per frame by the protocol of Boulanger-Lewandowski et al. (2012).

    python examples/music/jsb.py --data jsb-chorales-quarter.json --output runs/jsb
    python examples/music/jsb.py --data jsb-chorales-quarter.json --output runs/jsb --resume

The file has 229, 76 and 77 chorales in C, a list of frames each, a frame being the pitches that sound in a quarter
note: jsb-chorales-quarter.json of https://github.com/czhuang/JSB-Chorales-dataset, with the published split.

A frame is written as its pitches from below and a symbol that ends it, so that the product of the symbols'
probabilities is one of the frame; the loss of a frame is the sum of its symbols' losses. Pitches in another order than
that would be the same frame, and what the model believes of them is lost: its figures are upper bounds. Nothing is
left out, not even the first frame. Every chorale begins without memory.

The training text is read in all twelve keys, half of the time in C. Each chorale begins with a symbol of its key,
which for the held-out ones is C, as it is for every model that was published on these frames. The model that is best
in validation is kept; --output has it and `rows.csv`, the losses with memories of several lengths.
"""

import argparse
import csv
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import TrainerCallback, TrainingArguments, set_seed

sys.path.append(str(Path(__file__).resolve().parents[1]))

import txl_hf
from study import keep_options
from txl_hf import TokenStream, TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTrainer, token_losses
from txl_hf.command_line import CommandParser, at_least_one, at_least_zero, one_line_errors, positive
from txl_hf.files import whole_file
from txl_hf.training.checkpoints import last_checkpoint

SPLITS = {"train": "train", "validation": "valid", "test": "test"}
LOWEST, PITCHES = 21, 88
FRAME_END = PITCHES
# Of a chorale moved by -6 to 5 semitones.
SHIFTS = range(-6, 6)
VOCABULARY = PITCHES + 1 + len(SHIFTS)
SEGMENT, STREAMS = 64, 16
# The longest chorale has 768 symbols.
MEMORIES = (0, 64, 320, 768)

Chorale = list[list[int]]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="jsb-chorales-quarter.json")
    parser.add_argument("--output", type=Path, required=True, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--steps", type=at_least_one, default=1500, help="of 1,024 symbols")
    parser.add_argument("--minutes", type=positive, help="stop after so many, with the best model so far")
    parser.add_argument("--width", type=at_least_one, default=128, help="d_model")
    parser.add_argument("--layers", type=at_least_one, default=3, help="layers")
    parser.add_argument("--dropout", type=float, default=0.2, help="of states; half as much of attention")
    parser.add_argument("--memory", type=at_least_zero, default=256, help="mem_len in training")
    parser.add_argument("--learning_rate", type=positive, default=3e-3, help="at the end of the warm-up")
    parser.add_argument("--seed", type=at_least_zero, default=0, help="of weights, dropout and transpositions")
    return parser.parse_args(arguments)


# --- symbols ---------------------------------------------------------------------------------------------------------


def read_chorales(path: Path) -> dict[str, list[Chorale]]:
    """The chorales of each split.

    Raises:
        ValueError: the file does not hold what it should.
    """
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))
        chorales = {split: [[sorted({*frame}) for frame in c] for c in splits[SPLITS[split]]] for split in SPLITS}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must hold lists of frames under train, valid and test: {error!r}") from error
    for split, pieces in chorales.items():
        if not pieces:
            raise ValueError(f"{path} has no chorale under {SPLITS[split]}")
        for number, chorale in enumerate(pieces):
            if not chorale:
                raise ValueError(f"{path}: chorale {number} under {SPLITS[split]} has no frame")
            if wrong := [pitch for frame in chorale for pitch in frame if type(pitch) is not int]:
                raise ValueError(f"{path}: chorale {number} under {SPLITS[split]} has {wrong[0]!r} as a pitch")
    pitches = {pitch for split in chorales.values() for chorale in split for frame in chorale for pitch in frame}
    # All keys of a piano but those that transpositions need.
    lowest, highest = LOWEST - SHIFTS[0], LOWEST + PITCHES - 1 - SHIFTS[-1]
    if outside := [pitch for pitch in pitches if not lowest <= pitch <= highest]:
        raise ValueError(f"{path} has pitch {outside[0]}: in all keys, a piano has those from {lowest} to {highest}")
    return chorales


def write_symbols(chorale: Chorale, shift: int = 0) -> list[int]:
    """The symbol of the key, then each frame's pitches from below and its end."""
    symbols = [FRAME_END + 1 + SHIFTS.index(shift)]
    for frame in chorale:
        symbols += [pitch + shift - LOWEST for pitch in frame] + [FRAME_END]
    return symbols


def join(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """One text (N,) of all, and the places where each ends in it."""
    ends = np.cumsum([len(document) for document in documents])
    return np.concatenate([np.asarray(document, dtype=np.int16) for document in documents]), ends


def training_text(chorales: list[Chorale], length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """All chorales in a new order again and again until there are `length` symbols; half of them in a drawn key."""
    generator, documents, total = np.random.default_rng(seed), [], 0
    while total < length:
        for i in generator.permutation(len(chorales)):
            shift = int(generator.choice(SHIFTS)) if generator.random() < 0.5 else 0
            documents.append(write_symbols(chorales[i], shift))
            total += len(documents[-1])
    return join(documents)


# --- training and scores ---------------------------------------------------------------------------------------------


def make_model(arguments: argparse.Namespace) -> TransfoXLForCausalLM:
    heads = 4
    config = TransfoXLConfig(
        vocab_size=VOCABULARY,
        cutoffs=[],
        div_val=1,
        d_model=arguments.width,
        d_embed=arguments.width,
        n_head=heads,
        d_head=arguments.width // heads,
        d_inner=4 * arguments.width,
        n_layer=arguments.layers,
        tgt_len=SEGMENT,
        mem_len=arguments.memory,
        same_length=False,
        clamp_len=-1,
        initial_memory="empty",
        pre_lnorm=True,
        dropout=arguments.dropout,
        dropatt=arguments.dropout / 2,
        init_std=0.05,
        proj_init_std=0.05,
        eos_token_id=None,
    )
    return TransfoXLForCausalLM(config)


def make_streams(arguments: argparse.Namespace, chorales: dict[str, list[Chorale]]) -> dict[str, Any]:
    """The data sets that a Trainer learns from and is evaluated on."""
    text, ends = training_text(chorales["train"], arguments.steps * SEGMENT * STREAMS + 1, arguments.seed)
    held_out, held_out_ends = join([write_symbols(chorale) for chorale in chorales["validation"]])
    return {
        "train_dataset": TokenStream(text, SEGMENT, STREAMS, document_end=ends),
        "eval_dataset": TokenStream(held_out, SEGMENT, 8, keep_remainder=True, document_end=held_out_ends),
    }


def make_trainer(
    arguments: argparse.Namespace, model: TransfoXLForCausalLM, streams: dict[str, Any]
) -> TransfoXLTrainer:
    every = max(1, arguments.steps // 20)
    settings = TrainingArguments(
        str(arguments.output),
        max_steps=arguments.steps,
        per_device_train_batch_size=STREAMS,
        per_device_eval_batch_size=8,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(200, arguments.steps // 10),
        weight_decay=0.05,
        adam_beta2=0.98,
        max_grad_norm=0.5,
        eval_strategy="steps",
        save_strategy="steps",
        logging_steps=every,
        eval_steps=every,
        save_steps=every,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        seed=arguments.seed,
        use_cpu=not torch.accelerator.is_available(),
        report_to=[],
    )
    return TransfoXLTrainer(model, settings, **streams)


class StopAfter(TrainerCallback):
    """Ends a training after so many minutes."""

    def __init__(self, minutes: float):
        self.end = time.monotonic() + 60 * minutes

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= time.monotonic() > self.end


def nats_per_frame(model: TransfoXLForCausalLM, chorales: list[Chorale], memory_length: int) -> dict[str, float]:
    """The mean over all frames, and that over chorales of the mean over their frames."""
    sums = []
    for chorale in chorales:
        losses = token_losses(model, write_symbols(chorale), SEGMENT, memory_length)
        sums.append(losses.double().sum().item())
    frames = [len(chorale) for chorale in chorales]
    each = [nll / length for nll, length in zip(sums, frames, strict=True)]
    return {
        "frames": sum(frames),
        "nats_per_frame": sum(sums) / sum(frames),
        "mean_of_chorales": sum(each) / len(each),
    }


def origin(arguments: argparse.Namespace, model: TransfoXLForCausalLM) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    names = ("seed", "steps", "width", "layers", "dropout", "memory", "learning_rate")
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "txl_hf": txl_hf.__version__,
        "parameters": model.num_parameters(),
        **{name: getattr(arguments, name) for name in names},
    }


def main(arguments: list[str] | None = None):
    options = parse_arguments(arguments)
    with one_line_errors():
        if options.output.exists() and not options.resume:
            raise ValueError(f"--output {options.output} exists: go on with --resume, or choose another folder")
        chorales = read_chorales(options.data)
        set_seed(options.seed)
        model, streams = make_model(options), make_streams(options, chorales)
        # What could be refused has been: a folder that was begun goes on with its options.
        options.output.mkdir(parents=True, exist_ok=True)
        given = vars(options).keys() - {"data", "output", "resume", "minutes"}
        keep_options(options.output / "options.json", {name: getattr(options, name) for name in given})
        trainer = make_trainer(options, model, streams)
        if options.minutes is not None:
            trainer.add_callback(StopAfter(options.minutes))
        start = time.perf_counter()
        # A run that was stopped before its first checkpoint begins anew.
        trainer.train(resume_from_checkpoint=last_checkpoint(options.output))
    model = trainer.model.eval()
    rows = []
    for split in ("validation", "test"):
        for memory_length in MEMORIES:
            scores = nats_per_frame(model, chorales[split], memory_length)
            rows.append({"split": split, "memory_length": memory_length, **scores})
            print(f"{split} with memory {memory_length:>3}: {scores['nats_per_frame']:.3f} nats per frame")
    # Of this call alone, where a run has been resumed.
    done = {"seconds": round(time.perf_counter() - start), "steps_done": trainer.state.global_step}
    shared = done | origin(options, model)
    trainer.save_model()
    with whole_file(options.output / "rows.csv") as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *shared])
        writer.writeheader()
        writer.writerows(row | shared for row in rows)


if __name__ == "__main__":
    main()
