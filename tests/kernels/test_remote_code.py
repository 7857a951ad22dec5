"""Code that came with weights (`trust_remote_code`) and the kernels of the package."""

import pytest
import torch

from scripts import run_script

ASK = """
import sys, torch
{before}
from transformers.dynamic_module_utils import get_class_from_dynamic_module
# As the Auto classes do with trust_remote_code, where no package is registered.
model_class = get_class_from_dynamic_module("modeling_transfo_xl.TransfoXLForCausalLM", sys.argv[1])
model = model_class.from_pretrained(sys.argv[1]).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
attention = sys.modules[type(model).__module__.rpartition(".")[0] + ".attention_transfo_xl"]
ids = torch.arange(40)[None] % 61
with torch.no_grad():
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    {then}
"""


@pytest.fixture
def folder(make_model, tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def ask(folder, tmp_path, before, then):
    process = run_script(
        "-c",
        ASK.format(before=before, then=then),
        folder,
        only_torch=True,
        HF_HOME=str(tmp_path / "home"),
        HF_MODULES_CACHE=str(tmp_path / "modules"),
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


def test_code_that_came_with_weights_takes_the_kernels_of_the_package(folder, tmp_path):
    """Backends are found by transformers' `AttentionInterface`, which all copies share."""
    then = """
    assert {"txl_tiles", "txl_triton"} <= attention.BACKENDS.keys()
    model.set_attn_implementation("txl_tiles")
    import txl_hf.kernels.attention_cpu as tiles
    calls, attend = [], tiles._attend
    tiles._attend = lambda *inputs: calls.append(1) or attend(*inputs)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    print(len(calls))
"""
    assert ask(folder, tmp_path, "import txl_hf", then) == "2\n"


def test_without_the_package_a_kernel_says_what_to_install(folder, tmp_path):
    then = """
    torch.testing.assert_close(model(ids).logits, expected)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert list(attention.BACKENDS) == ["auto", "eager", "sdpa", "flex_attention"]
    try:
        model.set_attn_implementation("txl_triton")
    except ValueError as error:
        print(error)
"""
    said = ask(folder, tmp_path, "sys.modules['txl_hf'] = None", then)
    assert (
        said == "attn_implementation='txl_triton' is a kernel of the package: pip install txl-hf, and import txl_hf\n"
    )


def test_a_kernel_of_the_package_is_for_this_model_alone():
    """Another model that is given its name is told so."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import txl_hf  # noqa: F401

    with pytest.raises(TypeError, match="'txl_tiles' computes the attention of Transformer-XL alone"):
        ALL_ATTENTION_FUNCTIONS["txl_tiles"](torch.nn.Identity(), *[torch.zeros(1, 1, 2, 4)] * 3, None)
