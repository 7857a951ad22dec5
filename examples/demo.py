"""Train a small character-level Transformer-XL on real text, see what its memory is worth, save it and load it back.

    make demo                     # the source of Python's standard library, about five minutes on two CPU cores
    make demo TEXT=book.txt       # a text of your own
    python examples/demo.py --help

The output folder is ready for the Hub: the model with its code and tokenizer, a plot of bits per character against
memory length, and a continuation of held-out text. It appears when all of it is complete, or not at all.
"""

import argparse
import copy
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import transformers
from torch.utils.data import DataLoader
from tqdm import tqdm

from txl_hf import (
    TokenStream,
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLTokenizer,
    evaluate_language_model,
)
from txl_hf.command_line import CommandParser, one_line_errors
from txl_hf.data.texts import count_passed, whole
from txl_hf.evaluation.cards import to_results, write_model_card
from txl_hf.evaluation.language_model import LanguageModelEvaluation
from txl_hf.kernels.operators import bf16_is_faster

with one_line_errors():
    import matplotlib
    import matplotlib.pyplot as plt

SEGMENT_LENGTH = 64
BATCH_SIZE = 16
MEMORY_LENGTH = 128
EVALUATED_MEMORY_LENGTHS = (0, 32, 64, 128, 256, 512, 1024, 2048)
LEARNING_RATE = 3e-3
HELD_OUT = 50_000
PROMPT = 600
MINIMUM_TEXT = 10 * BATCH_SIZE * SEGMENT_LENGTH
# More than minutes of training can read.
MAXIMUM_TEXT = 10_000_000
PLOT = "memory_length.png"


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text",
        type=Path,
        help=f"a UTF-8 text file, of which {MAXIMUM_TEXT:,} characters are read; default: Python's standard library",
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder to write (%(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="training time (%(default)s)")
    parser.add_argument("--steps", type=int, help="train for so many steps instead of --minutes")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=160, help="d_model, a multiple of 8 (%(default)s)")
    arguments = parser.parse_args()
    steps = 1 if arguments.steps is None else arguments.steps
    sizes = (arguments.minutes, arguments.layers, arguments.width, steps)
    if not all(0 < size < math.inf for size in sizes) or arguments.width % 8:
        parser.error("sizes and times must be positive, and the width a multiple of 8")
    return arguments


def read_command_line() -> tuple[argparse.Namespace, str]:
    """The options, and the text. An error in either ends the demo."""
    arguments = parse_arguments()
    text = standard_library() if arguments.text is None else read_text(arguments.text)
    with one_line_errors():
        check_output(arguments.output)
    return arguments, text


def standard_library() -> str:
    """The modules of Python's standard library, one after the other in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    if len(text) < MINIMUM_TEXT:
        sys.exit(f"error: this Python has no source of its standard library in {folder}: give a text with TEXT=path")
    return text


def read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAXIMUM_TEXT)
    except OSError as error:
        sys.exit(f"error: --text {path} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        sys.exit(f"error: --text {path} is not a UTF-8 text")
    if "\0" in text:
        sys.exit(f"error: --text {path} is not a text: it contains zero bytes")
    if len(text) < MINIMUM_TEXT:
        sys.exit(f"error: --text {path} is too short: {len(text):,} characters, and the demo needs {MINIMUM_TEXT:,}")
    return text


def check_output(output: Path):
    """Whatever is replaced was written by this demo."""
    if output.exists() and not (output / PLOT).is_file():
        sys.exit(f"error: {output} exists and is no output of this demo: choose another folder with --output")
    output.parent.mkdir(parents=True, exist_ok=True)


def stop(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("\nInterrupted; no output was written.", file=sys.stderr)
    sys.exit(130)


def main(arguments: argparse.Namespace, text: str):
    started = time.monotonic()
    torch.manual_seed(0)
    # A model this small gains nothing from more threads.
    torch.set_num_threads(min(4, torch.get_num_threads()))
    transformers.logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory(dir=arguments.output.parent, prefix=f".{arguments.output.name}-") as scratch:
            folder = run(text, arguments, Path(scratch))
            replace(arguments.output, folder, Path(scratch))
    except OSError as error:
        sys.exit(f"error: {error}")
    seconds = time.monotonic() - started
    print(f"\nDone in {seconds:.0f} s. {arguments.output}/ holds the model, {PLOT} and continuation.txt. To write:")
    print(f'    {Path(sys.executable).parent}/txl-generate {arguments.output} --prompt "..." --max_new_tokens 300')


def run(text: str, arguments: argparse.Namespace, scratch: Path) -> Path:
    """The whole demo in a scratch folder; returns the folder of its output in there."""
    held_out_length = min(HELD_OUT, len(text) // 10)
    training, held_out = text[:-held_out_length], text[-held_out_length:]
    # Characters too rare to be learned become <unk>; <eos> is for programs that ask for one, and not in this text.
    with one_line_errors():
        tokenizer = TransfoXLTokenizer.train_from_iterator(
            lines(training), mode="characters", unk_token="<unk>", pad_token="<unk>", eos_token="<eos>", min_freq=10
        )
    counts = {"characters": len(held_out)} | count_passed(tokenizer, lines(held_out), "the held-out text")
    # Of a text of which much is <unk>, what was not guessed is no part of the figure.
    unit = "symbol" if whole(counts)[1] is None else "character"
    # For `txl-serve` and `transformers chat`: what is said is a text that goes on, line by line.
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    model = build_model(tokenizer, arguments.layers, arguments.width)
    print(
        f"Text: {len(text):,} characters, the last {len(held_out):,} of them held out; {len(tokenizer)} symbols.\n"
        f"Model: {arguments.layers} layers of {arguments.width}, {model.num_parameters():,} parameters, segments of "
        f"{SEGMENT_LENGTH} with a memory of {MEMORY_LENGTH}."
    )
    stream = TokenStream(tokenizer.encode_lines(lines(training)), SEGMENT_LENGTH, BATCH_SIZE)
    train(model, stream, arguments.minutes, arguments.steps, unit)

    folder = scratch / "output"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    evaluations = evaluate(model, tokenizer.encode_lines(lines(held_out)), unit)
    [scored] = [evaluation for evaluation in evaluations if evaluation.memory_length == MEMORY_LENGTH]
    names = ("perplexity", "bits_per_token", "segment_length", "memory_length")
    dataset = "Python's standard library" if arguments.text is None else arguments.text.stem
    results = to_results({"test": {name: getattr(scored, name) for name in names}}, dataset)
    name = arguments.output.name
    write_model_card(folder / "README.md", model, name, model_name=name, eval_results=results)
    plot(evaluations, folder / PLOT, unit)

    prompt = held_out[:PROMPT]
    continuation = reload(model, tokenizer, prompt, folder, scratch)
    (folder / "continuation.txt").write_text(prompt + continuation, encoding="utf-8")
    print(f"\nHeld-out text ...\n{indent(prompt[-200:])}\n... and how the model continues it:\n{indent(continuation)}")
    return folder


def replace(output: Path, folder: Path, scratch: Path):
    """Put the complete folder in its place; an older one goes with the scratch folder."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if output.exists():
        output.rename(scratch / "older")
    folder.rename(output)


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def indent(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def build_model(tokenizer: TransfoXLTokenizer, layers: int, width: int) -> TransfoXLForCausalLM:
    return TransfoXLForCausalLM(
        TransfoXLConfig(
            vocab_size=len(tokenizer),
            cutoffs=[],
            div_val=1,
            d_model=width,
            d_embed=width,
            n_head=4,
            d_head=width // 4,
            d_inner=4 * width,
            n_layer=layers,
            mem_len=MEMORY_LENGTH,
            tgt_len=SEGMENT_LENGTH,
            clamp_len=-1,
            # Distances beyond those of training count less the further they are.
            decay_len=SEGMENT_LENGTH + MEMORY_LENGTH,
            same_length=False,
            # The text begins with nothing before it.
            initial_memory="empty",
            # Most of the text is read less than once: there is nothing to regularise.
            dropout=0.0,
            pre_lnorm=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
    )


def learning_rate(done: float) -> float:
    """Warm-up over the first 2 % of training, then cosine decay to 0."""
    return LEARNING_RATE * min(1, 0.01 + 50 * done) * math.cos(math.pi / 2 * done) ** 2


def train(model: TransfoXLForCausalLM, stream: TokenStream, minutes: float, steps: int | None, unit: str):
    """Train for so many steps, or else for so many minutes; the learning rate follows what is done of either."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loader = DataLoader(stream, batch_size=stream.batch_size)
    # Where the CPU has it, a step takes two thirds of the time.
    takes_bf16 = bf16_is_faster()
    started, step, done, bits = time.monotonic(), 0, 0.0, math.nan
    model.train()
    bar_format = "{desc} {percentage:3.0f}% |{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=100, desc="train", bar_format=bar_format) as bar:
        while done < 1:
            # Each pass over the text starts without memory; within it, each step reads on where the last one stopped.
            mems = None
            for batch in loader:
                optimizer.param_groups[0]["lr"] = learning_rate(done)
                with torch.autocast("cpu", torch.bfloat16, enabled=takes_bf16):
                    outputs = model(**batch, mems=mems)
                outputs.loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                mems = outputs.mems

                step += 1
                loss = outputs.loss.item() / math.log(2)
                bits = loss if step == 1 else 0.98 * bits + 0.02 * loss
                done = min(1, step / steps if steps else (time.monotonic() - started) / (60 * minutes))
                bar.set_postfix_str(f"{bits:.2f} bits per {unit}", refresh=False)
                bar.update(100 * done - bar.n)
                if done == 1:
                    break
    print(f"Trained for {step} steps, {step * stream.batch_size * stream.segment_length:,} characters.")


def evaluate(model: TransfoXLForCausalLM, token_ids, unit: str) -> list[LanguageModelEvaluation]:
    """Score the held-out text with every memory length, and print a table."""
    evaluations = []
    for memory_length in tqdm(EVALUATED_MEMORY_LENGTHS, desc="evaluate", leave=False):
        batch_size = min(8, len(token_ids) // 1000 + 1)
        evaluations.append(
            evaluate_language_model(model, token_ids, SEGMENT_LENGTH, memory_length, batch_size=batch_size)
        )
    print(f"\n{'memory':>8}   held-out bits per {unit} ({evaluations[0].tokens:,} {unit}s)")
    for evaluation in evaluations:
        change = evaluation.bits_per_token / evaluations[0].bits_per_token - 1
        print(f"{evaluation.memory_length:>8}   {evaluation.bits_per_token:.3f}   {change:+.1%}")
    return evaluations


def plot(evaluations: list[LanguageModelEvaluation], path: Path, unit: str):
    matplotlib.use("Agg")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    memory_lengths = [str(evaluation.memory_length) for evaluation in evaluations]
    axes.plot(memory_lengths, [evaluation.bits_per_token for evaluation in evaluations], marker="o")
    axes.set_xlabel("memory length (characters)")
    axes.set_ylabel(f"held-out bits per {unit}")
    axes.set_title(f"Segments of {SEGMENT_LENGTH}, trained with a memory of {MEMORY_LENGTH}")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def reload(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, prompt: str, folder: Path, scratch: Path
) -> str:
    """Load the folder in new processes, with txl_hf and where it cannot be imported; returns the continuation."""
    (scratch / "prompt.txt").write_text(prompt, encoding="utf-8")
    # The folder's code goes through a cache of its own; nothing comes from elsewhere.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(scratch / "modules")}
    loaded = {}
    script = Path(__file__).with_name("demo_reload.py")
    for package in ("with", "without"):
        command = [sys.executable, str(script), str(folder), str(scratch / "prompt.txt")]
        process = subprocess.run(
            [*command, str(scratch / package), package],
            env=environment,
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        if process.returncode:
            sys.exit(f"error: the saved folder does not load {package} txl_hf:\n{process.stderr}")
        loaded[package] = torch.load(scratch / package)
    with torch.no_grad():
        expected = copy.deepcopy(model).double().eval()(**tokenizer(prompt, return_tensors="pt")).logits
    difference = max(float((expected - outputs["log_probs"]).abs().max()) for outputs in loaded.values())
    if difference > 1e-10 or loaded["with"]["continuation"] != loaded["without"]["continuation"]:
        sys.exit(f"error: the loaded model differs from the saved one: log-probabilities by up to {difference}")
    equal = "equal to the last bit" if difference == 0 else f"equal to {difference:.0e}"
    print(f"\nSaved, and loaded in new processes with txl_hf and without it: {equal} in float64.")
    return loaded["without"]["continuation"]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    main(*read_command_line())
