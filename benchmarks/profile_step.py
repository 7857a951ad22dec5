"""Where the time of one step goes: the kernels that take most of it, and for how much of it none runs.

    python benchmarks/profile_step.py --workload train-nvidia-base --contender ours-txl_triton --output notes.txt

A step is what `model.py` times: forward, backward, clipping and the optimiser; the segments that are read between two
losses, by a graph on a GPU, once the memory is full; or the tokens that `generate` writes.
"""

import argparse
import tempfile
from collections.abc import Iterable

import harness
import model as models

TOP = 40


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "profile.txt", budget=0.0)
    parser.add_argument("--workload", choices=untrained(), help="with --smoke smoke-train, else train-nvidia-base")
    parser.add_argument("--contender", default="ours-txl_triton")
    arguments = parser.parse_args(given)
    harness.complete(arguments)
    name = arguments.workload or ("smoke-train" if arguments.smoke else "train-nvidia-base")
    contender = "ours" if arguments.smoke else arguments.contender
    text = f"{name} {contender}\n{profile(name, contender, arguments)}\n"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("a") as file:
        file.write(text)
    print(text, flush=True)
    return 0


def untrained() -> list[str]:
    """The workloads that need no trained model."""
    return [name for name, workload in (models.WORKLOADS | models.SMOKE).items() if not workload.trained]


def profile(name: str, contender: str, arguments: argparse.Namespace) -> str:
    import torch
    from torch.profiler import ProfilerActivity

    workload = (models.WORKLOADS | models.SMOKE)[name]
    with tempfile.TemporaryDirectory() as folder:
        models.save(workload, folder)
        task = models.begin(contender, workload, folder, arguments)
    if workload.task != "train":
        # It leaves the memory of the prompt; an evaluation then begins anew.
        task.check(workload.batch)
    # A graph reads what is evaluated behind as many segments.
    for _ in range(3 + getattr(task, "opening", 0)):
        task.step()
    harness.synchronize(arguments.device)
    cuda = arguments.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    seconds = harness.seconds(task.step, arguments.device)
    with torch.profiler.profile(activities=activities) as found:
        task.step()
        harness.synchronize(arguments.device)
    by = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = found.key_averages()
    table = events.table(sort_by=by, row_limit=TOP, max_name_column_width=80)
    return f"{table}\na step takes {seconds * 1e3:.1f} ms; kernels {busy(events, cuda) * 1e3:.1f} ms of it"


def busy(events: Iterable, cuda: bool) -> float:
    """Seconds that the kernels of a profile take, or the operators where there is no GPU."""
    from torch.autograd import DeviceType

    if not cuda:
        return sum(event.self_cpu_time_total for event in events) / 1e6
    # An operator has the time of its kernels too, and a part of the program that has a name that of all in it.
    kernels = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    return sum(event.self_device_time_total for event in kernels) / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
