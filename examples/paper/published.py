"""The published checkpoints: download, convert, and evaluate as their authors did, beside what they published.

    python examples/paper/published.py wt103 --output checkpoints --data data/wikitext-103/wiki.test.tokens
    python examples/paper/published.py transfo-xl-wt103 --output checkpoints

NAME is wt103, enwik8, text8 or lm1b, of the authors' TensorFlow release, or transfo-xl-wt103, the Hub's copy of wt103
in legacy transformers' layout. `--data` is the test text as it was published (WikiText-103's `wiki.test.tokens`,
enwik8's and text8's `test.txt.raw`), or a folder of `prepare_corpus.py`; without it, nothing is evaluated.

`--output` then holds NAME/download with the files, NAME/model with the converted model, and NAME/result.json, beside
which result_options.json says what it was evaluated with. A download that was interrupted goes on where it was; the
files' checksums are recorded when they first are whole (`SHA256SUMS`, which `sha256sum -c` reads), and a file that is
not what was recorded is refused. What is there is not made again, and a result of other options is refused.
"""

import argparse
import hashlib
import http.client
import importlib
import importlib.util
import json
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))

import txl_hf
from study import options_that_differ
from txl_hf.command_line import CommandParser, at_least_one, one_line_errors
from txl_hf.files import write_text

AUTHORS = "http://curtis.ml.cmu.edu/datasets/pretrained_xl"
HUB = "https://huggingface.co/transfo-xl/transfo-xl-wt103/resolve/main"
ROOT = Path(__file__).resolve().parents[2]
SUMS = "SHA256SUMS"
BLOCK = 1 << 20
ATTEMPTS, PAUSE = 5, 1.0


@dataclass(frozen=True)
class Published:
    """A release: where its files are, who wrote them, and the figure that was published for its test text.

    Attributes:
        files: paths below `address`, kept under the same names; of those in a tuple, the first that is there.
        family: `--from` of the converter. checkpoint: the file or folder that it is given; None: loads as it is.
        metric: a field of evaluate_lm's results. figure: the paper's.
    """

    address: str
    files: tuple[str | tuple[str, ...], ...]
    family: str
    checkpoint: str
    metric: str
    figure: float
    source: str


def tensorflow(folder: str, step: int, metric: str, figure: float, table: int) -> Published:
    parts = [f"model/model.ckpt-{step}.{part}" for part in ("data-00000-of-00001", "index", "meta")]
    return Published(
        f"{AUTHORS}/{folder}",
        ("data/cache.pkl", "data/corpus-info.json", "model/checkpoint", *parts),
        "kimiyoung-tf",
        f"model/model.ckpt-{step}",
        metric,
        figure,
        f"paper, Table {table}",
    )


RELEASES = {
    "wt103": tensorflow("tf_wt103", 0, "perplexity", 18.3, 1),
    # As the authors' own script spells it.
    "enwik8": tensorflow("tf_enwiki8", 0, "bits_per_token", 0.99, 2),
    "text8": tensorflow("tf_text8", 0, "bits_per_token", 1.08, 3),
    "lm1b": tensorflow("tf_lm1b", 1191000, "perplexity", 21.8, 4),
    "transfo-xl-wt103": Published(
        HUB,
        # Legacy transformers knew the vocabulary by both names, and asked for the first.
        ("config.json", "pytorch_model.bin", ("vocab.pkl", "vocab.bin")),
        "transformers",
        ".",
        "perplexity",
        18.3,
        "paper, Table 1, of the checkpoint that it is a copy of",
    ),
}


def main(argv: list[str] | None = None):
    options = parse_arguments(argv)
    with one_line_errors():
        release, folder = RELEASES[options.name], options.output / options.name
        address = release.address
        for home in (AUTHORS, HUB):
            address = address.replace(home, (options.server or home).rstrip("/"))
        download(address, release.files, folder / "download")
        convert(release, folder)
        if options.data is None:
            print(f"{folder / 'model'} is converted; --data names the test text to evaluate it with")
        else:
            compare(release, evaluate(folder, options), options.name)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RELEASES, help="which release")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--data", type=Path, help="the test text, or a folder of prepare_corpus.py")
    parser.add_argument("--server", help="another address with the same files, in place of the authors' or the Hub's")
    parser.add_argument("--batch_size", type=at_least_one, default=1, help="streams of the evaluation (%(default)s)")
    parser.add_argument("--max_tokens", type=at_least_one, help="evaluate the beginning of the text only")
    return parser.parse_args(argv)


# ---- download ---------------------------------------------------------------------------------------------------


def download(address: str, files: tuple[str | tuple[str, ...], ...], folder: Path):
    """Fetch what is not there yet, and check all of it against what was recorded.

    Raises:
        OSError: the server does not have a file, or cannot be reached.
        ValueError: a file is not what was recorded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recorded = read_sums(folder / SUMS)
    for entry in files:
        names = (entry,) if isinstance(entry, str) else entry
        name = next((name for name in names if (folder / name).exists()), None) or fetch_first(address, names, folder)
        path = folder / name
        found = checksum(path)
        if recorded.setdefault(name, found) != found:
            raise ValueError(
                f"{path} has the SHA-256 {found}, but {recorded[name]} is recorded in {folder / SUMS}: it is damaged "
                "or another file. Remove it to fetch it again, or the record to accept it"
            )
        write_text(folder / SUMS, "".join(f"{value}  {file}\n" for file, value in recorded.items()))


def read_sums(path: Path) -> dict[str, str]:
    """{file: SHA-256} as `sha256sum` writes it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {name: value for value, name in (line.split("  ", 1) for line in lines)}


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_first(address: str, names: tuple[str, ...], folder: Path) -> str:
    """Fetch the first of these files that the server has; its name."""
    for name in names:
        path = folder / name
        part = path.with_name(f"{path.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fetch(f"{address}/{name}", part)
        except FileNotFoundError:
            if name == names[-1]:
                raise
            continue
        part.rename(path)
        break
    return name


def fetch(url: str, part: Path):
    """Fetch a file into `part`, from where an earlier call stopped, whatever number of times the connection breaks.

    Raises:
        FileNotFoundError: the server does not have it.
        OSError: the server refuses, or the connection breaks time after time without a byte more.
    """
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if receive(url, part):
                return
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            if error.code < 500:
                kind = FileNotFoundError if error.code == 404 else OSError
                raise kind(f"{url} cannot be fetched: the server says {error.code} {error.reason}") from None
            reason = f"the server says {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
        after = part.stat().st_size if part.exists() else 0
        failures = 0 if after > before else failures + 1
        if failures == ATTEMPTS:
            raise OSError(f"{url} cannot be fetched: {reason}; the same command goes on from byte {after}")
        time.sleep(min(30, 2**failures) * PAUSE)


def receive(url: str, part: Path) -> bool:
    """One connection; whether the file is whole now."""
    start, tag_path = part.stat().st_size if part.exists() else 0, part.with_name(f"{part.name}.etag")
    headers = {"User-Agent": "txl_hf"}
    if start and tag_path.exists():
        # From another version of the file the server sends all of it.
        headers |= {"Range": f"bytes={start}-", "If-Range": tag_path.read_text()}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{start}":
            tag_path.unlink(missing_ok=True)
            return True
        raise
    with response:
        resumed = response.status == 206
        start = start if resumed else 0
        tag = response.headers.get("ETag")
        if tag is None or tag.startswith("W/"):
            # A weak one does not promise the same bytes; a date does, to the second.
            tag = response.headers.get("Last-Modified")
        if tag is None:
            tag_path.unlink(missing_ok=True)
        else:
            tag_path.write_text(tag)
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        with (
            part.open("ab" if resumed else "wb") as file,
            tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=part.stem, disable=None) as bar,
        ):
            while block := response.read(BLOCK):
                file.write(block)
                bar.update(len(block))
    if total is not None and part.stat().st_size != total:
        return False
    tag_path.unlink(missing_ok=True)
    return True


# ---- convert and evaluate ---------------------------------------------------------------------------------------


def convert(release: Published, folder: Path):
    """Convert what was downloaded; where that fails, the converter has said why, in one line."""
    if (folder / "model").exists():
        return
    if importlib.util.find_spec("txl_hf.conversion") is None:
        # A clone that is not installed has the converters beside `src`.
        txl_hf.__path__.append(str(ROOT))
    command_line = importlib.import_module("txl_hf.conversion.command_line")
    source = folder / "download"
    command = ["--from", release.family, "--checkpoint", source / release.checkpoint, "--output", folder / "model"]
    if release.family == "kimiyoung-tf":
        command += ["--corpus", source / "data"]
    if status := command_line.main([*map(str, command)]):
        sys.exit(status)


def evaluate(folder: Path, options: argparse.Namespace) -> dict:
    """evaluate_lm's result with the lengths of the published evaluation, which the converted model has.

    Raises:
        ValueError: the result that is there is of other options.
    """
    from txl_hf.commands.evaluate_lm import main as evaluate_lm

    result, kept = folder / "result.json", folder / "result_options.json"
    today = {"data": str(options.data.resolve()), "batch_size": options.batch_size, "max_tokens": options.max_tokens}
    if result.exists() and kept.exists():
        if changed := options_that_differ(json.loads(kept.read_text(encoding="utf-8")), today):
            raise ValueError(f"{result} is of other options: {changed}; delete it to evaluate with these")
    else:
        # Written after the result: one without the other was stopped in between, and is made again.
        kept.unlink(missing_ok=True)
        command = ["--model", folder / "model", "--data", options.data, "--batch_size", options.batch_size, "--json"]
        if options.max_tokens is not None:
            command += ["--max_tokens", options.max_tokens]
        evaluate_lm([*map(str, command), "--output", str(result)])
        write_text(kept, json.dumps(today, indent=1) + "\n")
    return json.loads(result.read_text(encoding="utf-8"))


def compare(release: Published, result: dict, name: str):
    [row] = result["results"]
    print(
        f"{name}: {release.metric} {row[release.metric]:.4f} over {row['tokens']:,} tokens of {result['data']}, "
        f"published {release.figure} ({release.source}); segment {row['segment_length']}, memory "
        f"{row['memory_length']}, clamp {row['clamp_len']}, same_length {row['same_length']}"
    )


if __name__ == "__main__":
    main()
