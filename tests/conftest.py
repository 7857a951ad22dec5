import os

# Two workers share two cores; without this each would start a thread for every core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Losses are compared in fp32 on every machine; what has bf16 would train in it.
os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "no")
# Nothing is ever fetched but by tests marked `network`: another that tries fails at once instead of waiting.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import atexit
import gc
import subprocess
import venv
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from models import SMALL, small_config
from recorder import Recorder, Tape
from txl_hf import TransfoXLForCausalLM
from txl_hf.kernels import captured
from txl_hf.transfo_xl import adaptive_transfo_xl, masks_transfo_xl, memory_transfo_xl

logging.disable_progress_bar()
# At the end, triton counts what is left.
atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Leave out what reaches the network, unless it is asked for by name."""
    if "network" not in config.getoption("markexpr"):
        wanted = [item for item in items if item.get_closest_marker("network") is None]
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted


@pytest.fixture(scope="module", autouse=True)
def libraries_are_no_garbage():
    """Each search for garbage among their half a million objects takes a third of a second, and every training asks
    for several."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_disk_is_waited_for():
    """The suite would wait for it some twenty thousand times; only a power cut could show the difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device of a test that runs on each: `-m gpu` selects the one on a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


@pytest.fixture
def make_config():
    """A small configuration with weights so large that an error anywhere shows: `make_config(mem_len=3)`."""
    return small_config


@pytest.fixture
def make_model(make_config):
    """A small causal model in evaluation mode: `make_model(mem_len=3, attn_implementation="eager")`."""

    def make(attn_implementation="auto", model_class=TransfoXLForCausalLM, seed=0, **changes):
        torch.manual_seed(seed)
        config = make_config(**changes)
        config._attn_implementation = attn_implementation
        return model_class(config).eval()

    return make


@pytest.fixture
def make_ids():
    """Random tokens of the small vocabulary but its last, which stands for padding: `make_ids(2, 10)`."""

    def make(batch_size, length, seed=0, vocab_size=SMALL["vocab_size"] - 1):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocab_size, (batch_size, length), generator=generator)

    return make


@pytest.fixture
def recorder(monkeypatch):
    """A recorder that replaces CUDA graphs on a CPU."""
    found = Recorder()
    monkeypatch.setitem(captured.RECORDERS, "cpu", found)
    return found


@pytest.fixture
def tape(monkeypatch):
    """Records on a CPU as on a GPU, at whose numbers the model does not look; see `Tape`."""
    found = Tape()
    monkeypatch.setitem(captured.RECORDERS, "cpu", found)
    monkeypatch.setattr(adaptive_transfo_xl, "_check_range", lambda *args: None)
    for module in (masks_transfo_xl, memory_transfo_xl):
        monkeypatch.setattr(module, "can_look", lambda tensor, gpu=False: gpu)
    return found


@pytest.fixture(scope="session")
def legacy_python(tmp_path_factory):
    """An interpreter with transformers 4.35.2: that of TXL_LEGACY_PYTHON, or of an environment built for the test."""
    if python := os.environ.get("TXL_LEGACY_PYTHON"):
        return python
    folder = tmp_path_factory.mktemp("legacy") / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "transformers==4.35.2", "safetensors"]
    result = subprocess.run(install, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"transformers 4.35.2 cannot be installed here: {result.stderr.strip().splitlines()[-1]}")
    # Its own packages come first; torch is the one at hand.
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "torch_at_hand.pth").write_text(str(Path(torch.__file__).parents[1]))
    return python
