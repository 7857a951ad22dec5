"""The small model of the tests: one set of sizes, and weights so large that an error anywhere shows."""

import pytest
import torch

from txl_hf import TransfoXLConfig, TransfoXLForCausalLM
from txl_hf.transfo_xl.adaptive_transfo_xl import AdaptiveLogSoftmax
from txl_hf.transfo_xl.attention_transfo_xl import BACKENDS as ALL_BACKENDS
from txl_hf.transfo_xl.attention_transfo_xl import find_backend

# Triton's kernels have processes of their own; FlexAttention takes long to compile.
BACKENDS = [
    pytest.param(name, marks=pytest.mark.slow if name == "flex_attention" else ())
    for name in ALL_BACKENDS
    if name != "txl_triton"
]
# The first looks for breaks of a graph alone; the second traces what is written to as well, and takes twice as long.
COMPILERS = ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)]
SMALL = {
    "vocab_size": 61,
    "cutoffs": [9, 30],
    "d_model": 16,
    "d_embed": 16,
    "n_head": 2,
    "d_head": 8,
    "d_inner": 24,
    "div_val": 2,
    "n_layer": 2,
    "mem_len": 6,
    "clamp_len": -1,
    "same_length": False,
    "dropout": 0.0,
    "initial_memory": "empty",
    "init_std": 0.3,
    "proj_init_std": 0.3,
    "tgt_len": 5,
}


def refusal(name: str, inputs) -> str | None:
    """The reason why the backend of this name does not take these inputs; None if it does."""
    return find_backend(name).refusal(inputs)


def small_config(**changes) -> TransfoXLConfig:
    """`small_config(mem_len=3)`."""
    return TransfoXLConfig(**(SMALL | changes))


def small_model(model_class=TransfoXLForCausalLM, seed: int = 0, **changes):
    """The same weights for the same seed and sizes: `small_model(mem_len=3)`."""
    torch.manual_seed(seed)
    return model_class(small_config(**changes))


def random_softmax(config: TransfoXLConfig, seed: int = 0, std: float = 0.5) -> AdaptiveLogSoftmax:
    """One without a model, which would draw its weights: by itself it holds what was in memory before."""
    torch.manual_seed(seed)
    softmax = AdaptiveLogSoftmax(config)
    for parameter in softmax.parameters():
        torch.nn.init.normal_(parameter, 0, std)
    return softmax
