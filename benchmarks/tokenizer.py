"""Speed of the `"moses"` tokenizer against the legacy transformers one: the same prose, the same ids.

    python benchmarks/tokenizer.py --text wiki.test.tokens --peer-python OTHER_ENVIRONMENT/bin/python
    python benchmarks/tokenizer.py --text wiki.test.tokens --peer-python OTHER_ENVIRONMENT/bin/python --threads 2

WikiText's tokens are joined to prose, a vocabulary is counted on it, and both tokenizers encode it: called with its
lines, and as a file, by `encode_file`. Ours runs in this process, the legacy one (transformers < 4.36 with sacremoses)
in the interpreter that `--peer-python` names. Of one thread, processor time is measured, which other programs on the
machine disturb least. Of several, among which ours shares the lines and the legacy one cannot, it is the time that
passes, of both; the machine should have nothing else to do. The rows in `results/tokenizer.csv` are written only when
both give the same ids.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import harness

JOINS = [
    (r" @([-,.])@ ", r"\1"),
    (r" ([.,;:!?)%\]])", r"\1"),
    (r"([(\[$]) ", r"\1"),
    (r" (n't|'[a-z]+)\b", r"\1"),
    (r'" ([^"]*) "', r'"\1"'),
]


def prose(line: str) -> str:
    for pattern, replacement in JOINS:
        line = re.sub(pattern, replacement, line)
    return line.strip()


def measure(encoders: dict[str, Callable[[], list]], repeats: int, threads: int) -> dict[str, dict]:
    """For each way to encode: the seconds of each repeat, the number of ids and their hash."""
    clock = time.process_time if threads == 1 else time.perf_counter
    found = {}
    for way, encode in encoders.items():
        seconds = []
        for _ in range(repeats):
            start = clock()
            ids = encode()
            seconds.append(clock() - start)
        flat = [each for line in ids for each in line] if isinstance(ids[0], list) else ids
        hashed = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        found[way] = {"seconds": seconds, "tokens": len(flat), "hash": hashed}
    return found


def measure_peer(vocab_file: str, text: str, repeats: int, threads: int) -> dict:
    import transformers

    tokenizer = transformers.TransfoXLTokenizer(vocab_file=vocab_file)
    lines = Path(text).read_text(encoding="utf-8").split("\n")
    encoders = {
        "lines": lambda: [tokenizer(line)["input_ids"] for line in lines],
        "file": lambda: tokenizer.encode_file(text, ordered=True).tolist(),
    }
    return {"transformers": transformers.__version__, **measure(encoders, repeats, threads)}


def percentiles(seconds: list[float]) -> list[float]:
    ordered = sorted(seconds)
    return [ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default="wikitext-2/wiki.test.tokens", help="prose, a line a paragraph")
    parser.add_argument("--peer-python", help="an interpreter with transformers 4.35 and sacremoses")
    parser.add_argument("--repeats", type=int, default=10, help="of ours; the legacy one runs a third as often")
    parser.add_argument("--threads", type=int, default=1, help="for ours (1)")
    parser.add_argument(
        "--output", type=Path, default=harness.RESULTS / "tokenizer.csv", help="a row is appended to it"
    )
    parser.add_argument("--peer", nargs=3, metavar=("VOCABULARY", "TEXT", "REPEATS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"--threads {arguments.threads} must be at least 1")
    os.environ.update(
        RAYON_NUM_THREADS=str(arguments.threads),
        TOKENIZERS_PARALLELISM=str(arguments.threads > 1).lower(),
        OMP_NUM_THREADS="1",
    )
    if arguments.peer:
        vocab_file, text, repeats = arguments.peer
        print(json.dumps(measure_peer(vocab_file, text, int(repeats), arguments.threads)))
        return
    if not arguments.peer_python:
        parser.error("--peer-python is needed: a speed is told only beside the legacy tokenizer's in the same run.")

    import tokenizers
    import transformers

    from txl_hf.transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer

    lines = [prose(line) for line in arguments.text.read_text(encoding="utf-8").split("\n") if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        TransfoXLTokenizer.train_from_iterator(lines, mode="moses").save_vocabulary(folder)
        vocab_file, text = f"{folder}/vocab.txt", f"{folder}/prose.txt"
        Path(text).write_text("\n".join(lines), encoding="utf-8")
        tokenizer = TransfoXLTokenizer(vocab_file=vocab_file)
        encoders = {
            "lines": lambda: tokenizer(lines)["input_ids"],
            "file": lambda: tokenizer.encode_file(text, add_eos=False).tolist(),
        }
        repeats = str(max(arguments.repeats // 3, 1))
        command = [arguments.peer_python, __file__, "--peer", vocab_file, text, repeats]
        command += ["--threads", str(arguments.threads)]
        half = arguments.repeats - arguments.repeats // 2
        before = measure(encoders, half, arguments.threads)
        peer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        after = measure(encoders, half, arguments.threads)
    common = {
        "date": datetime.date.today().isoformat(),
        "commit": harness.commit(),
        "text": arguments.text.name,
        "threads": arguments.threads,
        "processor": harness.processor(),
        "python": platform.python_version(),
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "peer_transformers": peer["transformers"],
    }
    rows = []
    for way, ours in before.items():
        if ours["hash"] != peer[way]["hash"]:
            theirs = peer[way]["tokens"]
            sys.exit(f"no row: the ids of {way} differ ({ours['tokens']} of ours, {theirs} of the legacy tokenizer)")
        row = {**common, "way": way, "tokens": ours["tokens"]}
        middle = []
        for name, seconds in (("", ours["seconds"] + after[way]["seconds"]), ("peer_", peer[way]["seconds"])):
            quantiles = percentiles(seconds)
            row |= {f"{name}seconds_p{p}": f"{s:.3f}" for p, s in zip((20, 50, 80), quantiles, strict=True)}
            row[f"{name}tokens_per_second"] = round(ours["tokens"] / quantiles[1])
            middle.append(quantiles[1])
        row["times_peer"] = f"{middle[1] / middle[0]:.1f}"
        rows.append(row)
        pace = f"{row['tokens_per_second']:,} tokens/s, legacy {row['peer_tokens_per_second']:,}"
        print(f"{way}: {pace}: {row['times_peer']} times")
    harness.append(arguments.output, rows)


if __name__ == "__main__":
    main()
