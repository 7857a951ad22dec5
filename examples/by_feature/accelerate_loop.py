"""A training loop of one's own with accelerate: the memory of each stream goes from step to step, and is evaluated.

    python examples/by_feature/accelerate_loop.py --smoke
    accelerate launch --config_file examples/launch/cpu.yaml examples/by_feature/accelerate_loop.py --text book.txt

What `TransfoXLTrainer` does besides (whole checkpoints, resuming on other processes, averages, graphs) is not here.
The streams of `TokenStream` are shared out among the processes by accelerate; --resume goes on from --output.
"""

import argparse
import atexit
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import get_scheduler

from txl_hf import TokenStream, TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer
from txl_hf.data.streams import check_loader
from txl_hf.evaluation.metrics import LanguageModelMetric
from txl_hf.memories import memory_of

SIZES = {"n_layer": 4, "d_model": 128, "d_embed": 128, "n_head": 4, "d_head": 32, "d_inner": 512, "mem_len": 64}
SMALL = {"n_layer": 1, "d_model": 16, "d_embed": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "mem_len": 8}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="text file, of which the last tenth is held out")
    parser.add_argument("--output", type=Path, help="folder for checkpoints and the model")
    parser.add_argument("--batch_size", type=int, default=8, help="streams of all processes")
    parser.add_argument("--segment_length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save_steps", type=int, default=200)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    parser.add_argument("--smoke", action="store_true", help="some steps of a small model on this script")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.text, arguments.segment_length = arguments.text or Path(__file__), 8
        arguments.steps, arguments.save_steps = min(arguments.steps, 12), 6
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        arguments.output = arguments.output or Path(folder.name)
    if arguments.text is None or arguments.output is None:
        parser.error("name a --text and an --output, or try --smoke")
    return arguments


def main(argv: list[str] | None = None):
    arguments = parse_arguments(argv)
    accelerator = Accelerator()
    text = arguments.text.read_text(encoding="utf-8")
    tokenizer = TransfoXLTokenizer.train_from_iterator([text], mode="characters")
    token_ids = tokenizer.encode_lines([text])
    cut = len(token_ids) * 9 // 10
    sizes = {"segment_length": arguments.segment_length, "batch_size": arguments.batch_size}
    streams = [TokenStream(token_ids[:cut], **sizes), TokenStream(token_ids[cut:], **sizes, keep_remainder=True)]
    # accelerate deals whole batches to the processes in turn: rows per process, in the order of the streams.
    rows = arguments.batch_size // accelerator.num_processes
    loaders = [DataLoader(stream, batch_size=rows, generator=torch.Generator()) for stream in streams]

    set_seed(0)
    config = TransfoXLConfig(
        vocab_size=len(tokenizer), cutoffs=[], div_val=1, initial_memory="empty", clamp_len=-1, same_length=False,
        dropout=0.0, eos_token_id=None, **(SMALL if arguments.smoke else SIZES),
    )  # fmt: skip
    model = TransfoXLForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    # Not prepared: a prepared schedule takes a step for each process.
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=arguments.steps)
    model, optimizer, training, held_out = accelerator.prepare(model, optimizer, *loaders)
    accelerator.register_for_checkpointing(scheduler)
    for loader in (training, held_out):
        check_loader(loader, num_processes=accelerator.num_processes, process_index=accelerator.process_index)

    step, memory = 0, {}
    checkpoint = arguments.output / "checkpoint"
    # The memory of a process's own rows lies beside what accelerate saves.
    of_process = checkpoint / f"memory_{accelerator.process_index}.pt"
    if arguments.resume and checkpoint.exists():
        accelerator.load_state(checkpoint)
        saved = torch.load(of_process, map_location=accelerator.device)
        step, memory = saved["step"], saved["memory"]
    while step < arguments.steps:
        # Every epoch reads the text from its beginning, where nothing is remembered.
        done = step % streams[0].steps
        memory = memory if done else {}
        training.set_epoch(step // streams[0].steps)
        for batch in skip_first_batches(training, done) if done else training:
            outputs = model(**batch, **memory)
            # Detached: gradients stay within a segment.
            memory = memory_of(outputs)
            accelerator.backward(outputs.loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            loss = accelerator.gather(outputs.loss.detach()).mean().item()
            accelerator.print(f"step {step}: loss {loss:.6f}")
            if step % arguments.save_steps == 0 or step == arguments.steps:
                accelerator.save_state(checkpoint)
                torch.save({"step": step, "memory": memory}, of_process)
                accelerator.wait_for_everyone()
            if step == arguments.steps:
                break
    score = evaluate(accelerator, model, held_out)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(arguments.output / "model")
        tokenizer.save_pretrained(arguments.output / "model")
        (arguments.output / "score.json").write_text(json.dumps(score))
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, float]:
    """Score a text with the memory of each stream; the sums of all processes are gathered."""
    metric, memory = LanguageModelMetric(), dict[str, Any]()
    model.eval()
    for batch in loader:
        outputs = model(**batch, **memory)
        memory = memory_of(outputs)
        counted = (batch["shift_labels"] != -100).sum(-1)
        nll, tokens = accelerator.gather((outputs.losses.sum(-1), counted))
        metric.add_batch(nll=nll, tokens=tokens)
    score = metric.compute()
    accelerator.print(f"held-out bits per character: {score['bits_per_token']:.4f}, of {score['tokens']} characters")
    return score


if __name__ == "__main__":
    main()
