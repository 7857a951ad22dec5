"""Tests of programs that use the package run where these are installed, and say elsewhere what they lack:
`make test-clients` has them all, and fails where one is missing.
"""

import os
import shutil
from importlib.util import find_spec

import pytest

# What each needs: modules, and programs of the system.
CLIENTS = {
    "test_browser.py": (["onnx", "onnxruntime", "onnxscript"], ["chromium", "npm"]),
    "test_kernel.py": (["kernels", "triton"], []),
    "test_lm_eval.py": (["lm_eval"], []),
    "test_minigrid.py": (["minigrid"], []),
    "test_midi_readers.py": (["miditok", "music21", "pretty_midi", "symusic"], []),
    "test_onnx.py": (["onnx", "onnxruntime", "onnxscript"], []),
    # What the others need that the page has blocks of.
    "test_page.py": (
        "bitsandbytes fastapi gradio lm_eval onnx onnxruntime onnxscript openai optimum.quanto peft sb3_contrib "
        "torchao torchrl trl uvicorn webdataset".split(),
        ["curl", "npm"],
    ),
    "test_quantisation.py": (["bitsandbytes", "torchao", "optimum.quanto"], []),
    "test_recurrent_ppo.py": (["sb3_contrib"], []),
    "test_serve.py": (["fastapi", "openai", "uvicorn"], []),
    "test_space.py": (["gradio"], []),
    "test_space_browser.py": (["gradio"], ["chromium"]),
    "test_torchrl.py": (["gymnasium", "tensordict", "torchrl"], []),
    "test_trl.py": (["trl"], []),
    "test_webdataset.py": (["webdataset"], []),
}


class Lacking(pytest.Module):
    """A file whose programs are not here: skipped as a whole, before anything of it is imported, unless all are asked
    for.
    """

    lacks = ""

    def collect(self):
        if os.environ.get("TXL_CLIENTS") == "all":
            raise self.CollectError(f"{self.path.name} needs {self.lacks}")
        raise pytest.skip.Exception(f"{self.path.name} needs {self.lacks}: make test-clients", allow_module_level=True)


def is_installed(name: str) -> bool:
    """Whether a module can be imported; not a folder of that name without a file, as tests/kernels is."""
    try:
        return getattr(find_spec(name), "origin", None) is not None
    except ModuleNotFoundError:
        return False


def pytest_pycollect_makemodule(module_path, parent):
    modules, programs = CLIENTS[module_path.name]
    lacks = [name for name in modules if not is_installed(name)]
    lacks += [name for name in programs if shutil.which(name) is None]
    if not lacks:
        return None
    module = Lacking.from_parent(parent, path=module_path)
    module.lacks = ", ".join(lacks)
    return module
