"""Steps a second of memory_agent.py beside CleanRL's ppo_trxl.py, which runs as it is; rollout and learning apart.

    git clone https://github.com/vwxyzjn/cleanrl
    pip install gymnasium==0.29.1 popgym memory-gym minigrid pygame tyro einops opencv-python-headless
    python benchmarks/agents.py --cleanrl cleanrl/cleanrl/ppo_trxl/ppo_trxl.py

Both have the same sizes and task, POPGym's RepeatPreviousMedium; a window is longer than its 103 steps, because theirs
prints the mean return of the episodes that ended. Layers differ: theirs has no gates, a feed-forward layer of half the
width, and absolute positions. A turn is an iteration; learning begins with the advantages. `processor_ms`, the time of
the processor, depends less on other programs than the clock; `load` is the number of processes that ran or waited.
"""

import argparse
import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

import gymnasium

import harness

SCRIPT = Path(__file__).resolve()
TASK, EPISODE = "repeat_previous_medium", 103
# Options of memory_agent.py, with their names in ppo_trxl.py.
SIZES = {
    "layers": ("trxl_num_layers", 1), "width": ("trxl_dim", 64), "memory_length": ("trxl_memory_length", 64),
    "num_envs": ("num_envs", 32), "window": ("num_steps", 128),
    "epochs": ("update_epochs", 4), "minibatches": ("num_minibatches", 4),
}  # fmt: skip


def main(given: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "agents.csv", budget=120.0)
    parser.set_defaults(device="cpu")
    parser.add_argument("--cleanrl", type=Path, required=True, metavar="FILE", help="its ppo_trxl.py")
    for name, (_, value) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="(%(default)s)")
    parser.add_argument("--worker", choices=["ours", "cleanrl"], help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.worker:
        harness.prepare(arguments)
        return {"ours": play_ours, "cleanrl": play_theirs}[arguments.worker](arguments)
    harness.complete(arguments)
    sizes = {name: getattr(arguments, name) for name in SIZES}
    origin = harness.origin("cpu", "fp32", arguments.threads) | harness.versions()
    origin |= {"gymnasium": gymnasium.__version__, "task": TASK} | sizes
    given = {"threads": arguments.threads, "cleanrl": arguments.cleanrl.resolve(), **sizes}
    command = [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in given.items())]
    contenders = {name: harness.Contender([*command, "--worker", name]) for name in ("ours", "cleanrl")}
    harness.ask_all(contenders, "turn")
    turns = harness.take_turns(contenders, arguments.seconds, *arguments.repeats)
    for contender in contenders.values():
        contender.stop()
    steps = arguments.num_envs * arguments.window
    harness.append(arguments.output, [origin | {"contender": name} | summary(turns[name], steps) for name in turns])


def summary(answers: list[dict], steps: int) -> dict[str, float]:
    row: dict[str, float] = {"repeats": len(answers), "load": round(os.getloadavg()[0], 1)}
    for part in answers[0]:
        seconds, processor = (harness.quantiles(list(each)) for each in zip(*(a[part] for a in answers), strict=True))
        rates = {f"{part}_steps_per_second_p{p}": steps / s for p, s in zip((80, 50, 20), seconds, strict=True)}
        row |= {name: harness.significant(rate) for name, rate in sorted(rates.items())}
        row[f"{part}_processor_ms"] = harness.significant(1000 * processor[1])
    print(*(f"{name} {value:,g}" for name, value in row.items() if name.endswith(("p50", "ms"))), sep=", ", flush=True)
    return row


def mark(marks: list[tuple[float, float]]):
    marks.append((time.perf_counter(), time.process_time()))


def answer(marks: list[tuple[float, float]]) -> dict[str, list[float]]:
    """Seconds of the clock and of the processor, from marks at the beginning and behind each of the two parts."""
    parts = zip(("rollout", "learning"), marks, marks[1:], strict=False)
    return {part: [end[0] - start[0], end[1] - start[1]] for part, start, end in parts}


def play_ours(arguments: argparse.Namespace):
    sys.path.insert(0, str(SCRIPT.parents[1] / "examples" / "by_feature"))
    from memory_agent import PARSER, Run

    marks: list[tuple[float, float]] = []

    class Timed(Run):
        def advantages(self, *given):
            mark(marks)
            return super().advantages(*given)

    options = [f"--{name}={getattr(arguments, name)}" for name in SIZES]

    def turn() -> dict[str, float]:
        marks.clear()
        mark(marks)
        rollout, _ = run.play()
        run.learn(rollout)
        mark(marks)
        return answer(marks)

    with tempfile.TemporaryDirectory() as folder:
        run = Timed(PARSER.parse_args([*options, "--env", TASK, "--output", folder]))
        run.begin_block()
        harness.serve({"turn": turn})


def play_theirs(arguments: argparse.Namespace):
    """Their script is one loop, and its only calls of `reversed`, for the advantages, and of `print`, at the end of an
    iteration, say where that is: they are given to it as names of its module."""
    from popgym.envs.repeat_previous import RepeatPreviousMedium

    def make(render_mode=None):
        return gymnasium.wrappers.FlattenObservation(RepeatPreviousMedium())

    gymnasium.register("RepeatPrevious-v0", entry_point=make, max_episode_steps=EPISODE)
    marks: list[tuple[float, float]] = []

    def begin_iteration():
        sys.stdin.readline()
        marks.clear()
        mark(marks)

    def begin_advantages(steps: range):
        mark(marks)
        return reversed(steps)

    def end_iteration(*_):
        mark(marks)
        print(json.dumps(answer(marks)), file=channel, flush=True)
        begin_iteration()

    options = [f"--{theirs}={getattr(arguments, name)}" for name, (theirs, _) in SIZES.items()]
    sys.argv = [arguments.cleanrl.name, "--env_id=RepeatPrevious-v0", "--no-cuda", *options]
    sys.path.insert(0, str(arguments.cleanrl.parent))
    channel, sys.stdout = sys.stdout, sys.stderr
    hooks = {"print": end_iteration, "reversed": begin_advantages}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        begin_iteration()
        runpy.run_path(str(arguments.cleanrl), init_globals=hooks, run_name="__main__")


if __name__ == "__main__":
    main()
