"""Files of checkpoints: finding them, and describing other content in an error."""

import json
from itertools import islice
from pathlib import Path

from txl_hf.legacy.unpickle import StandIn, shown

from .layout import ConversionError, Source
from .torch_file import StoredTensor

# The first bytes of compressed files.
PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


def find_file(path: Path, names: tuple, expected: str) -> Path:
    """Return `path`, or the first of `names` in it where it is a folder. Raises ConversionError, with `expected`."""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(512)
        if head.startswith(PACKED) or head[257:262] == b"ustar":
            raise ConversionError(f"{path} is a packed file; unpack it first: {expected}")
        return path
    if not path.exists():
        raise ConversionError(f"{path} does not exist; {expected}")
    for name in names:
        if (path / name).is_file():
            return path / name
    content = sorted(entry.name for entry in path.iterdir())
    listed = ", ".join(content[:4]) + (", …" if len(content) > 4 else "")
    raise ConversionError(f"{path} is a folder of {len(content)} files ({listed}); {expected}")


def read_json(path: Path) -> dict:
    """Return the object in a file of JSON. Raises ConversionError."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConversionError(f"{path} holds no JSON object")
    return content


def state_dict_sources(state: object, where: object) -> list[Source]:
    """Return the unpickled state dict `state` as a list of Source; `where` is named in errors."""
    if not isinstance(state, dict):
        raise ConversionError(f"{where} holds {describe(state)}; expected a dictionary of tensors")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
            raise ConversionError(f"{where} has {describe(tensor)} among its tensors, under {describe(name)}")
    return [Source(name, tensor.shape, tensor.read, tensor.place) for name, tensor in state.items()]


def code_span(name: str) -> str:
    """Return a file's name for the model card, in Markdown that shows it as it is."""
    return "`" + "".join(letter if letter.isprintable() and letter != "`" else "?" for letter in name) + "`"


def describe(value: object) -> str:
    """Return a few words for an unpickled value, for error messages."""
    if isinstance(value, StandIn):
        return f"an object of class {shown(value.name)}"
    if isinstance(value, str):
        return f"the text '{shown(value)}'"
    if isinstance(value, dict):
        keys = ", ".join(shown(key) for key in islice(value, 4) if isinstance(key, str))
        return f"a dictionary with {len(value)} keys ({keys}, …)"
    return f"a {type(value).__name__}"
