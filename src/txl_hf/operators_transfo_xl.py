"""What the operators that torch.compile keeps whole are called."""

import re

__all__ = ["namespace_of"]


def namespace_of(module: str) -> str:
    """The namespace of a module's operators: its name, with what torch takes in none, nor in an argument, spelt out.

    Where code is loaded from a folder, the folder's name, whatever it holds, is a part of the module's.
    """
    return re.sub(r"\W", lambda found: "_" if found[0] == "." else f"_{ord(found[0]):x}_", module, flags=re.ASCII)
