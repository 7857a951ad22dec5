"""Where the goldens are: what the original implementations wrote and computed. golden/README.md describes each."""

from pathlib import Path

GOLDENS = Path(__file__).parent / "golden"


def golden(path: str) -> Path:
    """The path of a golden file or folder: `golden("hf_legacy/wt103_like")`.

    Raises:
        FileNotFoundError: there is no such golden. Every one is in the repository, so that no test may skip for want
            of it.
    """
    found = GOLDENS / path
    if not found.exists():
        raise FileNotFoundError(f"{path} is none of the goldens in {GOLDENS}")
    return found
