"""Tests of programs that use the package run where these are installed: `make test-clients`."""

from importlib.util import find_spec

CLIENTS = {
    "test_lm_eval.py": "lm_eval",
    "test_midi_readers.py": "music21",
    "test_onnx.py": "onnxruntime",
    "test_page.py": "trl",
    "test_quantisation.py": "bitsandbytes",
    "test_serve.py": "fastapi",
    "test_space.py": "gradio",
    "test_trl.py": "trl",
}
collect_ignore = [name for name, client in CLIENTS.items() if find_spec(client) is None]
