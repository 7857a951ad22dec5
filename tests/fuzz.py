"""Damaged and hostile files for every reader, for as long as one likes: `python tests/fuzz.py --minutes 30`.

Each target makes its cases from a seed: `--target convert --seed 7 --first 120 --count 1` runs one again. A case ends
in a result or in one line that says what is wrong. It is a failure where any other error escapes, code runs, something
is left behind, a case takes a minute, or the process more memory than twice its files and 1 GiB.
"""

import argparse
import contextlib
import io
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import conftest  # noqa: F401 - sets up the package of this checkout
from goldens import GOLDENS
from models import small_model
from peak_memory import bounded_memory
from txl_hf import load_memory, save_memory
from txl_hf.conversion import command_line, torch_file
from txl_hf.legacy.unpickle import StandIn, UnsafePickleError

# What no reader has any business with; a hook cannot be removed, so that it is switched.
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)
CASE_SECONDS = 60
# Address space that a case may take beside that of the libraries; what needs more gets a MemoryError.
BOUND = (600 << 20) + 2 * (8 << 20)
CHECKPOINTS = {
    "kimiyoung-pytorch": ["kimiyoung_pytorch/char_base.model.pt", "kimiyoung_pytorch_corpus/cache.pkl"],
    "nvidia": ["nvidia_pytorch/nv_large_like/checkpoint_best.pt"],
    "kimiyoung-tf": ["kimiyoung_tf/tf_wt103_like", "kimiyoung_tf/tf_enwik8_like"],
    "transformers": ["hf_legacy/wt103_like", "hf_legacy/wt103_like_safetensors", "tokenizer/cased"],
}
MODELS = ["hf_legacy/wt103_like", "hf_legacy/wt103_like_safetensors", "hf_legacy/enwik8_like"]
ADDED = [
    "vocab.pkl",
    "vocab.bin",
    "pytorch_model.bin",
    "model.safetensors",
    "cache.pt",
    "cache.pkl",
    "training_args.bin",
]
OPCODES = [bytes([code]) for code in range(256)]
PIECES = [
    *[b"cos\nsystem\n", b"cbuiltins\neval\n", b"ccollections\nOrderedDict\n", b"ccollections\nCounter\n", b"}b"],
    *[b"X\x07\x00\x00\x00idx2sym", b"X\x02\x00\x00\x00os", b"K\x01", b"h\x00", b"q\x00", b"\x94", b"\x85R", b")R"],
    *[b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"(K\x00K\x04t", b"Q", b"](K\x01K\x02e"],
]  # fmt: skip
_forbidden: list[str] | None = None


def _watch(event: str, arguments: tuple) -> None:
    if _forbidden is not None and event.startswith(FORBIDDEN):
        _forbidden.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_watch)


class Hostile:
    """Pickles as a call that leaves a mark."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


class Failure(AssertionError):
    """A case that the reader did not handle."""


# ---- damage ----


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Change a few bytes, cut, repeat or splice; more often at the ends, where a format describes itself."""
    content = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        size = len(content)
        at = draw.choice(
            [draw.randrange(size + 1), draw.randrange(min(size, 4000) + 1), size - draw.randrange(min(size, 3000) + 1)]
        )
        match draw.randrange(7):
            case 0 if content:
                content[min(at, size - 1)] ^= 1 << draw.randrange(8)
            case 1:
                content[at : at + draw.randint(0, 4)] = draw.randbytes(draw.randint(0, 4))
            case 2:
                del content[at:]
            case 3:
                content[at:at] = content[at : at + draw.randint(1, 64)] * draw.randint(1, 50)
            case 4:
                content[at:at] = draw.choice(PIECES)
            case 5:
                number = draw.choice([0, 1, 255, 2**31 - 1, 2**32 - 1, 2**63 - 1])
                content[at : at + 8] = number.to_bytes(8, "little")
            case _:
                other = draw.randrange(size + 1)
                content[at : at + 40] = content[other : other + 40]
    return bytes(content)


def program(draw: random.Random) -> bytes:
    return (
        b"\x80\x02" + b"".join(draw.choice(draw.choice([PIECES, OPCODES])) for _ in range(draw.randint(1, 60))) + b"."
    )


def copy_damaged(golden: Path, folder: Path, draw: random.Random) -> Path:
    """Copy a golden file or folder, with one of its files damaged, into `folder`; return the copy."""
    copy = folder / golden.name
    if golden.is_file():
        copy.write_bytes(mutate(golden.read_bytes(), draw))
        return copy
    shutil.copytree(golden, copy, ignore=shutil.ignore_patterns("golden.*", "expected.json"))
    files = sorted(path for path in copy.iterdir() if path.is_file())
    path = draw.choice(files)
    path.write_bytes(mutate(path.read_bytes(), draw))
    return copy


# ---- targets: each runs one case in an empty folder ----


def converted(family: str, checkpoint: Path, folder: Path) -> None:
    output = folder / "out"
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        arguments = ["--from", family, "--checkpoint", str(checkpoint), "--output", str(output)]
        status = command_line.main(arguments)
    lines = [line for line in errors.getvalue().splitlines() if line.startswith("txl-convert")]
    if status not in (0, 1) or (status == 1) != (len(lines) == 1) or "Traceback" in errors.getvalue():
        raise Failure(f"status {status}, {errors.getvalue()[-500:]}")
    left = [path.name for path in folder.iterdir() if path not in (output, checkpoint, checkpoint.parent)]
    if left or (status == 1 and output.exists()):
        raise Failure(f"left {left} behind")


def fuzz_convert(draw: random.Random, folder: Path) -> None:
    family = draw.choice(sorted(CHECKPOINTS))
    converted(family, copy_damaged(GOLDENS / draw.choice(CHECKPOINTS[family]), folder, draw), folder)


def fuzz_unpickle(draw: random.Random, folder: Path) -> None:
    names = [name for names in CHECKPOINTS.values() for name in names if not (GOLDENS / name).is_dir()]
    data = program(draw) if draw.random() < 0.5 else mutate((GOLDENS / draw.choice(names)).read_bytes(), draw)
    (folder / "file").write_bytes(data)
    try:
        pending = [torch_file.load(folder / "file")]
        for _ in range(200):
            value = pending.pop() if pending else None
            if isinstance(value, torch_file.StoredTensor):
                value.read()
            elif isinstance(value, dict | StandIn):
                entries = value.attributes if isinstance(value, StandIn) else value
                pending += list(entries.values())[:20]
    except UnsafePickleError as error:
        if not str(error).isprintable():
            raise Failure(f"{error!r} is not one line") from error


def refused(load: Callable, folder: Path) -> None:
    """Load, or be refused by an error that a user can tell from a defect, with no advice to load unsafely."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            load(folder)
        except (ValueError, OSError) as error:
            if "weights_only=False" in "".join(traceback.format_exception(error)):
                raise Failure(f"advises to load unsafely: {error}") from error


def fuzz_models(draw: random.Random, folder: Path) -> None:
    refused(AutoModelForCausalLM.from_pretrained, copy_damaged(GOLDENS / draw.choice(MODELS), folder, draw))


def fuzz_tokenizers(draw: random.Random, folder: Path) -> None:
    golden = GOLDENS / draw.choice(["tokenizer/cased", "tokenizer/lower"])
    if draw.random() < 0.5:
        AutoTokenizer.from_pretrained(golden).save_pretrained(folder / "saved")
        golden = folder / "saved"
    refused(AutoTokenizer.from_pretrained, copy_damaged(golden, folder / "copy", draw))


def fuzz_memories(draw: random.Random, folder: Path) -> None:
    model = small_model()
    save_memory(folder / "memory", model, model(torch.ones(1, 9, dtype=torch.long), use_cache=draw.random() < 0.5))
    (folder / "memory").write_bytes(mutate((folder / "memory").read_bytes(), draw))
    refused(lambda path: load_memory(path / "memory", model), folder)


def fuzz_planted(draw: random.Random, folder: Path) -> None:
    """A pickle that leaves a mark, in each form, in the place of any file of a checkpoint, or beside them."""
    mark, family = folder.parent / "mark", draw.choice(sorted(CHECKPOINTS))
    checkpoint = folder / "checkpoint"
    golden = GOLDENS / draw.choice(CHECKPOINTS[family])
    shutil.copytree(golden if golden.is_dir() else golden.parent, checkpoint)
    values = [Hostile(mark), {"model_state": Hostile(mark), "model_config": {}}, {"idx2sym": [Hostile(mark)]}]
    for path in sorted({*checkpoint.iterdir(), *(checkpoint / name for name in ADDED)}):
        match draw.randrange(6):
            case 0:
                path.write_bytes(pickle.dumps(draw.choice(values), protocol=draw.randrange(5)))
            case 1:
                torch.save(draw.choice(values), path)
            case 2:
                torch.save(draw.choice(values), path, _use_new_zipfile_serialization=False)
    target = checkpoint if golden.is_dir() else checkpoint / golden.name
    converted(family, target, folder)
    refused(AutoModelForCausalLM.from_pretrained, checkpoint)
    refused(AutoTokenizer.from_pretrained, checkpoint)
    if mark.exists():
        mark.unlink()
        raise Failure("the hostile pickle ran")


TARGETS: dict[str, Callable[[random.Random, Path], None]] = {
    "convert": fuzz_convert,
    "unpickle": fuzz_unpickle,
    "models": fuzz_models,
    "tokenizers": fuzz_tokenizers,
    "memories": fuzz_memories,
    "planted": fuzz_planted,
}


def run_case(target: str, seed: int, case: int, folder: Path) -> None:
    """Run one case in `folder`, which is emptied. Raises Failure, or what escaped."""
    global _forbidden
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("", "copy", "saved"):
        (folder / name).mkdir(parents=True, exist_ok=True) if target == "tokenizers" or not name else None
    _forbidden = []
    try:
        # A few bytes of a pickle can ask for much; what is refused for that is no failure.
        with bounded_memory(BOUND):
            TARGETS[target](random.Random(f"{target} {seed} {case}"), folder)
        events = _forbidden
    finally:
        _forbidden = None
    if events:
        raise Failure(f"it did {events[:3]}")


# ---- the command ----


def work(target: str, seed: int, cases: Iterator[int], seconds: float) -> int:
    """Run cases until the time is up; return how many failed. The last line printed is the case that runs."""
    end, failed = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            if time.monotonic() > end:
                break
            print(f"case {case}", flush=True)
            try:
                run_case(target, seed, case, Path(folder) / "case")
            except Exception as error:
                failed += 1
                lines = traceback.format_exc().splitlines()[-7:]
                print(
                    f"FAILED {target} seed {seed} case {case}: {type(error).__name__}: {error}"[:600], *lines, sep="\n"
                )
                if failed == 20:
                    break
    return failed


def watch(target: str, seed: int, minutes: float) -> bool:
    """Run a target in a process of its own, which may hang or die; return whether it was without failure."""
    command = [sys.executable, __file__, "--target", target, "--seed", str(seed), "--minutes", str(minutes), "--work"]
    first, failed, end = 0, False, time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            # Opened twice: who shares a file shares the place in it, and the one moves it while the other reads.
            log = Path(folder) / "log"
            with log.open("wb") as written:
                process = subprocess.Popen([*command, "--first", str(first)], stdout=written, stderr=subprocess.STDOUT)
            last, since = None, time.monotonic()
            while process.poll() is None and time.monotonic() < end + CASE_SECONDS:
                time.sleep(1)
                cases = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("case ")]
                if cases and cases[-1] != last:
                    last, since = cases[-1], time.monotonic()
                elif time.monotonic() - since > CASE_SECONDS + 60 * (last is None):
                    process.kill()
            process.kill()
            process.wait()
            lines = log.read_text(errors="replace").splitlines()
        ran = [int(line.split()[1]) for line in lines if line.startswith("case ")]
        print(*(line for line in lines if not line.startswith("case ")), sep="\n")
        print(f"{target}: seed {seed}, cases {first} to {ran[-1] if ran else first}, exit status {process.returncode}")
        if process.returncode == 0:
            break
        failed = True
        if process.returncode in (1, 2):
            break
        first = (ran[-1] if ran else first) + 1  # beyond the one that hung or killed it
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--target", choices=TARGETS, help="one alone")
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    parser.add_argument("--count", type=int, help="how many cases; default: until the time is up")
    parser.add_argument("--work", action="store_true", help="in this process")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    if arguments.work or arguments.count is not None:
        last = arguments.first + (arguments.count or 10**9)
        cases = iter(range(arguments.first, last))
        return int(work(arguments.target, arguments.seed, cases, 60 * arguments.minutes) > 0)
    targets = [arguments.target] if arguments.target else list(TARGETS)
    return int(not all([watch(target, arguments.seed, arguments.minutes / len(targets)) for target in targets]))


if __name__ == "__main__":
    sys.exit(main())
