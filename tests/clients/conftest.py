"""Tests of programs that use the package run where these are installed: `make test-clients`."""

import shutil
from importlib.util import find_spec

# What each needs: modules, and programs of the system.
CLIENTS = {
    "test_browser.py": (["onnxruntime"], ["chromium", "npm"]),
    "test_lm_eval.py": (["lm_eval"], []),
    "test_midi_readers.py": (["music21", "pretty_midi"], []),
    "test_onnx.py": (["onnxruntime"], []),
    "test_page.py": (["trl"], []),
    "test_quantisation.py": (["bitsandbytes"], []),
    "test_recurrent_ppo.py": (["sb3_contrib"], []),
    "test_serve.py": (["fastapi"], []),
    "test_space.py": (["gradio"], []),
    "test_trl.py": (["trl"], []),
}
collect_ignore = [
    name
    for name, (modules, programs) in CLIENTS.items()
    if not all(map(find_spec, modules)) or not all(map(shutil.which, programs))
]
