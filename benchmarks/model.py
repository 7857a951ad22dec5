"""Training, streaming evaluation and decoding on CPU beside other implementations of the same size.

    python benchmarks/model.py --peer-python OTHER_ENVIRONMENT/bin/python [--workloads decode-enwik8-512 …]

Contenders are processes that take turns: each repeat runs every contender once, so that whatever else the machine does
falls on all of them. `legacy` (transformers 4.35.2, in the interpreter that `--peer-python` names) loads the weights
that we saved and must give the same losses or the same text before anything is timed; `gpt2` is what a user would pick
instead, transformers' GPT-2 of the same size with SDPA. Rows go to `results/model.csv`.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "model.csv"

ENWIK8 = {
    "vocab_size": 204,
    "cutoffs": [],
    "div_val": 1,
    "d_model": 512,
    "d_embed": 512,
    "n_head": 8,
    "d_head": 64,
    "d_inner": 2048,
    "n_layer": 12,
    "clamp_len": -1,
    "same_length": False,
    "untie_r": True,
    "dropout": 0.0,
}
WT103 = ENWIK8 | {
    "vocab_size": 267735,
    "cutoffs": [20000, 40000, 200000],
    "d_model": 410,
    "d_embed": 410,
    "n_head": 10,
    "d_head": 41,
    "d_inner": 2100,
    "n_layer": 16,
}
# name: (task, model, memory, segment, batch, contenders)
OURS = ["ours", "ours-mems", "legacy"]
WORKLOADS = {
    "train-enwik8": ("train", ENWIK8, 512, 512, 2, ["ours", "ours-eager", "legacy", "gpt2"]),
    "train-wt103": ("train", WT103, 150, 150, 2, ["ours", "ours-eager", "legacy"]),
    "evaluate-enwik8-2048": ("evaluate", ENWIK8, 2048, 128, 1, OURS),
    "evaluate-enwik8-3800": ("evaluate", ENWIK8, 3800, 128, 1, OURS),
    "evaluate-wt103-640": ("evaluate", WT103, 640, 64, 1, OURS),
    "decode-enwik8-512": ("decode", ENWIK8, 512, 16, 1, ["ours", "legacy", "gpt2"]),
    "decode-enwik8-2048": ("decode", ENWIK8, 2048, 16, 1, ["ours", "legacy", "gpt2"]),
    "decode-wt103-640": ("decode", WT103, 640, 16, 1, ["ours", "legacy"]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="interpreter with transformers 4.35.2; without it there is no legacy")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--worker", nargs=3, metavar=("CONTENDER", "WORKLOAD", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(*arguments.worker, arguments.threads)
    for workload in arguments.workloads:
        compare(workload, arguments)


def compare(workload: str, arguments: argparse.Namespace):
    task, config, memory, segment, batch, contenders = WORKLOADS[workload]
    contenders = [name for name in contenders if name != "legacy" or arguments.peer_python]
    with tempfile.TemporaryDirectory() as folder:
        save_model(config | {"mem_len": memory}, folder)
        workers = {name: start(name, workload, folder, arguments) for name in contenders}
        try:
            checks = {name: ask(worker, "check") for name, worker in workers.items()}
            difference = check(task, {name: c for name, c in checks.items() if name != "gpt2"})
            for worker in workers.values():
                ask(worker, "run")
            seconds = {name: [] for name in contenders}
            for _ in range(arguments.repeats):
                for name, worker in workers.items():
                    seconds[name].append(ask(worker, "run")["seconds"])
            report(workload, seconds, checks, difference, arguments)
        finally:
            for worker in workers.values():
                worker.kill()


def save_model(config: dict, folder: str):
    import torch

    from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

    torch.manual_seed(0)
    TransfoXLForCausalLM(TransfoXLConfig(**config)).save_pretrained(folder)


def start(name: str, workload: str, folder: str, arguments: argparse.Namespace) -> subprocess.Popen:
    python = arguments.peer_python if name == "legacy" else sys.executable
    command = [python, __file__, "--threads", str(arguments.threads), "--worker", name, workload, folder]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def ask(worker: subprocess.Popen, request: str) -> dict:
    worker.stdin.write(request + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise SystemExit(f"{' '.join(worker.args)} stopped; run it by hand and type '{request}' to see why")
    return json.loads(answer)


def check(task: str, checks: dict[str, dict]) -> float:
    """The largest difference of a loss from ours; texts must be equal."""
    reference = checks["ours"]["values"]
    worst = 0.0
    for name, answer in checks.items():
        if task == "decode":
            if answer["values"] != reference:
                raise SystemExit(f"{name} writes another text: {answer['values']} for {reference}")
        else:
            worst = max(worst, max(abs(a - b) for a, b in zip(answer["values"], reference, strict=True)))
    if worst > 1e-3:
        raise SystemExit(f"losses differ by {worst}")
    return worst


def report(workload: str, seconds: dict, checks: dict, difference: float, arguments: argparse.Namespace):
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    RESULTS.parent.mkdir(exist_ok=True)
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = None
        for name, times in seconds.items():
            tokens = checks[name]["tokens"]
            p20, p50, p80 = (statistics.quantiles(times, n=10, method="inclusive")[i] for i in (1, 4, 7))
            ratios = [other / mine for other, mine in zip(seconds.get("legacy", []), times, strict=False)]
            row = {
                "date": datetime.date.today().isoformat(),
                "commit": commit.stdout.strip(),
                "workload": workload,
                "contender": name,
                "tokens_per_second_p20": round(tokens / p80, 2),
                "tokens_per_second_p50": round(tokens / p50, 2),
                "tokens_per_second_p80": round(tokens / p20, 2),
                "times_legacy_p50": round(statistics.median(ratios), 2) if ratios else "",
                "repeats": len(times),
                "max_loss_difference": f"{difference:.1e}",
                "threads": arguments.threads,
                "processor": next(
                    (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
                    platform.processor(),
                ),
                "torch": checks[name]["torch"],
                "transformers": checks[name]["transformers"],
            }
            if writer is None:
                writer = csv.DictWriter(file, row)
                if new:
                    writer.writeheader()
            writer.writerow(row)
            print(f"{workload:22} {name:11} {row['tokens_per_second_p50']:9.1f} tokens/s   {row['times_legacy_p50']}×")
            sys.stdout.flush()


# ---- what a contender does; this half also runs under transformers 4.35 -------------------------------------------


def work(contender: str, workload: str, folder: str, threads: int):
    import torch
    import transformers

    torch.set_num_threads(threads)
    task, config, memory, segment, batch, _ = WORKLOADS[workload]
    model = load(contender, config, memory, folder)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 200, (batch, 4 * segment), generator=generator)
    run = {"train": train, "evaluate": evaluate, "decode": decode}[task](contender, model, ids, memory, segment)
    for line in sys.stdin:
        seconds, values = next(run)
        answer = {"seconds": seconds}
        if line.strip() == "check":
            answer |= {"values": values, "tokens": batch * segment if task != "decode" else segment}
            answer |= {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps(answer), flush=True)


def load(contender: str, config: dict, memory: int, folder: str):
    if contender == "legacy":
        from transformers import TransfoXLLMHeadModel

        return TransfoXLLMHeadModel.from_pretrained(folder)
    if contender == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config["vocab_size"],
                n_positions=memory + 1024,
                n_embd=config["d_model"],
                n_layer=config["n_layer"],
                n_head=config["n_head"],
                n_inner=config["d_inner"],
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    from txl_hf import TransfoXLForCausalLM

    backend = contender.partition("-")[2]
    return TransfoXLForCausalLM.from_pretrained(
        folder, attn_implementation=backend if backend in ("eager", "sdpa", "flex_attention") else None
    )


def train(contender: str, model, ids, memory: int, segment: int):
    """One optimiser step a turn: forward, backward, Adam. Yields its seconds and its loss."""
    import torch

    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    mems, step = None, 0
    while True:
        segment_ids = ids[:, (step % 4) * segment : (step % 4 + 1) * segment]
        begin = time.perf_counter()
        if contender == "gpt2":
            output = model(segment_ids, labels=segment_ids)
            loss = output.loss
        else:
            output = model(segment_ids, mems=mems, labels=segment_ids)
            mems, loss = output.mems, output.losses.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        yield time.perf_counter() - begin, [loss.item()]


def evaluate(contender: str, model, ids, memory: int, segment: int):
    """One segment a turn with a full memory. Yields its seconds and its mean loss."""
    import torch

    model.eval()
    past, step = {}, 0
    with torch.no_grad():
        while True:
            segment_ids = ids[:, (step % 4) * segment : (step % 4 + 1) * segment]
            begin = time.perf_counter()
            if contender == "ours":
                output = model(segment_ids, labels=segment_ids, use_cache=True, **past)
                past = {"past_key_values": output.past_key_values}
            else:
                output = model(segment_ids, labels=segment_ids, **past)
                past = {"mems": output.mems}
            step += 1
            yield time.perf_counter() - begin, [output.losses.mean().item()]


def decode(contender: str, model, ids, memory: int, segment: int):
    """`segment` tokens a turn through generate, greedily, after a memory that is full. Yields the seconds and
    the text.

    The initial memory is as many zero states as the memory holds. What can be computed once, before the first token,
    lies in a cache; the legacy model has none, and its first token is a token like any other.
    """
    import copy

    import torch

    model.eval()
    options = {"max_new_tokens": segment, "min_new_tokens": segment, "do_sample": False, "pad_token_id": 0}
    first, cache = ids[:, :1], None
    if contender != "legacy":
        prompt = torch.randint(1, 200, (1, memory)) if contender == "gpt2" else first
        with torch.no_grad():
            output = model(prompt, use_cache=True)
        cache = output.past_key_values
        first = torch.cat([prompt, output.logits[:, -1:].argmax(-1)], 1)
    else:
        first = model.generate(first, max_new_tokens=1, do_sample=False, pad_token_id=0)
    while True:
        past = {} if cache is None else {"past_key_values": copy.deepcopy(cache)}
        begin = time.perf_counter()
        text = model.generate(first, **past, **options)
        yield time.perf_counter() - begin, text[0, -segment:].tolist()


if __name__ == "__main__":
    main()
