"""Speed of the `"moses"` tokenizer against the legacy transformers one: the same prose, the same ids, one thread.

    python benchmarks/tokenizer.py --text wiki.test.tokens --peer-python OTHER_ENVIRONMENT/bin/python

WikiText's tokens are joined to prose, a vocabulary is counted on it, and both tokenizers encode it line by line. Ours
runs in this process, the legacy one (transformers < 4.36 with sacremoses) in the interpreter that `--peer-python`
names. Processor time is measured, which other programs on the machine disturb least. The row in
`results/tokenizer.csv` is written only when both give the same ids.
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
from pathlib import Path

import harness

os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

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


def measure(tokenizer, encode, lines: list[str], repeats: int) -> dict:
    """Processor seconds of each repeat of `encode(lines)`, the number of ids and their hash."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        ids = encode(lines)
        seconds.append(time.process_time() - start)
    import tokenizers
    import transformers

    return {
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "class": type(tokenizer).__name__,
        "seconds": seconds,
        "tokens": sum(map(len, ids)),
        "hash": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
    }


def measure_peer(vocab_file: str, lines: list[str], repeats: int) -> dict:
    from transformers import TransfoXLTokenizer

    tokenizer = TransfoXLTokenizer(vocab_file=vocab_file)
    return measure(tokenizer, lambda lines: [tokenizer(line)["input_ids"] for line in lines], lines, repeats)


def percentiles(seconds: list[float]) -> list[float]:
    ordered = sorted(seconds)
    return [ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default="../shared/data/wikitext-2/wiki.test.tokens")
    parser.add_argument("--peer-python", help="an interpreter with transformers 4.35 and sacremoses")
    parser.add_argument("--repeats", type=int, default=10, help="of ours; the legacy one runs a third as often")
    parser.add_argument(
        "--output", type=Path, default=harness.RESULTS / "tokenizer.csv", help="a row is appended to it"
    )
    parser.add_argument("--peer", nargs=3, metavar=("VOCABULARY", "LINES", "REPEATS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        vocab_file, lines_file, repeats = arguments.peer
        print(json.dumps(measure_peer(vocab_file, json.loads(Path(lines_file).read_text()), int(repeats))))
        return
    if not arguments.peer_python:
        parser.error("--peer-python is needed: a speed is told only beside the legacy tokenizer's in the same run.")

    from txl_hf.tokenization_transfo_xl import TransfoXLTokenizer

    lines = [prose(line) for line in arguments.text.read_text(encoding="utf-8").split("\n") if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        TransfoXLTokenizer.train_from_iterator(lines, mode="moses").save_vocabulary(folder)
        vocab_file, lines_file = f"{folder}/vocab.txt", f"{folder}/lines.json"
        Path(lines_file).write_text(json.dumps(lines))
        tokenizer = TransfoXLTokenizer(vocab_file=vocab_file)
        repeats = str(max(arguments.repeats // 3, 1))
        command = [arguments.peer_python, __file__, "--peer", vocab_file, lines_file, repeats]
        half = arguments.repeats - arguments.repeats // 2
        ours = measure(tokenizer, lambda lines: tokenizer(lines)["input_ids"], lines, half)
        peer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        ours["seconds"] += measure(tokenizer, lambda lines: tokenizer(lines)["input_ids"], lines, half)["seconds"]
    if ours["hash"] != peer["hash"]:
        sys.exit(f"no row: the ids differ ({ours['tokens']} of ours, {peer['tokens']} of the legacy tokenizer)")

    ours_seconds, peer_seconds = percentiles(ours["seconds"]), percentiles(peer["seconds"])
    row = {
        "date": datetime.date.today().isoformat(),
        "commit": harness.commit(),
        "text": arguments.text.name,
        "tokens": ours["tokens"],
        "threads": 1,
        "processor": harness.processor(),
        "python": platform.python_version(),
        "transformers": ours["transformers"],
        "tokenizers": ours["tokenizers"],
        "peer_transformers": peer["transformers"],
    }
    for name, seconds in (("", ours_seconds), ("peer_", peer_seconds)):
        row |= {f"{name}seconds_p{p}": f"{s:.3f}" for p, s in zip((20, 50, 80), seconds, strict=True)}
        row[f"{name}tokens_per_second"] = round(ours["tokens"] / seconds[1])
    row["times_peer"] = f"{peer_seconds[1] / ours_seconds[1]:.1f}"
    harness.append(arguments.output, [row])
    print(
        f"{row['tokens_per_second']:,} tokens/s, legacy {row['peer_tokens_per_second']:,}: {row['times_peer']} times"
    )


if __name__ == "__main__":
    main()
