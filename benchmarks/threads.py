"""How threads that wait for one another should do so: a small model's training alone and beside other programs.

    python benchmarks/threads.py             # where nothing else runs
    python benchmarks/threads.py --busy 2    # beside two other trainings

Each setting trains in processes of its own, in turns; before a turn counts, its losses must be those of one thread.
`briefly` is what the benchmarks set. Rows go to `benchmarks/results/threads.csv`.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import harness

RESULTS = Path(__file__).parent / "results" / "threads.csv"
# Layers are four; (width, rows, tokens of a segment).
MODELS = {"width 128, 12 × 64 tokens": (128, 12, 64), "width 256, 32 × 100 tokens": (256, 32, 100)}
SMOKE = {"smoke": (16, 2, 8)}
OTHER = next(iter(MODELS.values()))
SETTINGS = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "as torch": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "briefly": {"GOMP_SPINCOUNT": str(harness.SPIN_COUNT)},
}
VARIABLES = {name for setting in SETTINGS.values() for name in setting}
WARM_UP = 2


def train(width: int, rows: int, length: int, seconds: float) -> dict[str, list[float]]:
    """Steps for so many seconds, no fewer than five: the losses, and the seconds of those behind the first two."""
    import torch

    from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

    torch.manual_seed(0)
    sizes = {"d_model": width, "d_embed": width, "d_inner": 4 * width, "d_head": width // 4, "n_head": 4, "n_layer": 4}
    config = TransfoXLConfig(
        vocab_size=256, cutoffs=[], div_val=1, **sizes, mem_len=64, clamp_len=-1, dropout=0.0, pre_lnorm=True
    )
    model = TransfoXLForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(256, (rows, length))
    mems, losses, times = None, [], []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < WARM_UP + 3:
        start = time.perf_counter()
        outputs = model(input_ids=ids, labels=ids, mems=mems)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mems = outputs.mems
        times.append(time.perf_counter() - start)
        losses.append(outputs.loss.item())
    return {"losses": losses, "seconds": times[WARM_UP:]}


@contextlib.contextmanager
def other_programs(count: int) -> Iterator[None]:
    """Trainings of the smaller model, each in one thread, which go on until the block ends."""
    command = [sys.executable, str(Path(__file__)), "--turn", *map(str, OTHER), "1e9"]
    environment = os.environ | SETTINGS["one thread"]
    programs = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def turn(sizes: tuple[int, int, int], seconds: float, setting: dict[str, str]) -> dict[str, list[float]]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, str(Path(__file__)), "--turn", *map(str, sizes), str(seconds)]
    process = subprocess.run(command, env=environment | setting, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"a turn failed: {process.stderr}")
    return json.loads(process.stdout)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0, help="other trainings beside, of one thread each (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one turn (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one short turn: try the script itself")
    parser.add_argument("--output", type=Path, default=RESULTS, help="rows are appended to it")
    parser.add_argument("--turn", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.turn:
        *sizes, seconds = options.turn
        print(json.dumps(train(*map(int, sizes), float(seconds))))
        return
    if options.smoke:
        harness.keep_smoke_out(options.output)
    models, turns, seconds = (SMOKE, 1, 0.0) if options.smoke else (MODELS, options.turns, options.seconds)
    origin = {**harness.origin("cpu", "fp32", os.cpu_count() or 1), **harness.versions(), "busy": options.busy}
    with other_programs(options.busy):
        for name, sizes in models.items():
            found: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
            for _ in range(turns):
                expected = None
                for setting, variables in SETTINGS.items():
                    result = turn(sizes, seconds, variables)
                    losses = result["losses"][: WARM_UP + 3]
                    expected = expected or losses
                    if max(abs(a - b) for a, b in zip(losses, expected, strict=True)) > 1e-4:
                        sys.exit(f"{name}, {setting}: losses of {losses} where one thread has {expected}")
                    found[setting].append(sizes[1] * sizes[2] / statistics.median(result["seconds"]))
            rows = []
            for setting, speeds in found.items():
                median = statistics.median(speeds)
                print(f"{name:28} {setting:12} {median:8,.0f} tokens/s ({min(speeds):,.0f} to {max(speeds):,.0f})")
                speed = {"lowest": min(speeds), "tokens_per_second_p50": median, "highest": max(speeds)}
                numbers = {column: harness.significant(value) for column, value in speed.items()}
                rows.append({**origin, "model": name, "setting": setting, "turns": turns, **numbers})
            harness.append(options.output, rows)


if __name__ == "__main__":
    main()
