"""What the operators that torch.compile keeps whole are called, and whether a graph is to be exported."""

import re

import torch

__all__ = ["is_exporting", "namespace_of"]


def is_exporting(unknown: bool = False) -> bool:
    """Whether it is torch.export that traces; `unknown` where PyTorch cannot tell, up to 2.6.

    To what it compiles PyTorch 2.11 answers `torch.compiler.is_exporting()` with True; what that reads is right.
    """
    return getattr(torch.compiler, "_is_exporting_flag", unknown)


def namespace_of(module: str) -> str:
    """The namespace of a module's operators: its name, with what torch takes in none, nor in an argument, spelt out.

    Where code is loaded from a folder, the folder's name, whatever it holds, is a part of the module's.
    """
    return re.sub(r"\W", lambda found: "_" if found[0] == "." else f"_{ord(found[0]):x}_", module, flags=re.ASCII)
