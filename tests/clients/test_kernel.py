"""The folder of `make kernel`, loaded by huggingface's `kernels`, beside eager; in Triton's interpreter."""

import os
import subprocess
import sys

import hub_kernel

CODE = """
import sys
from pathlib import Path

import torch
from kernels import get_loaded_kernels, get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]))
(loaded,) = get_loaded_kernels()
assert kernel.__name__ == loaded.metadata.id and loaded.metadata.license == "Apache-2.0"
assert not {"txl_hf", "transformers"} & {*sys.modules}

import txl_hf
from txl_hf.transfo_xl.attention_transfo_xl import relative_attention

torch.manual_seed(0)
B, H, L, K, D = 2, 2, 21, 26, 8
query, key, value = (torch.randn(B, H, n, D) for n in (L, K, K))
u, v = torch.randn(2, H, D)
hidden = torch.rand(B, 1, L, K) > 0.4
for options in ({}, {"window": 7}, {"future": 3}, {"future": 20, "hidden": hidden}):
    tensors = [query, key, value, torch.randn(H, K + options.get("future", 0), D), u, v]
    results = []
    # The package's own kernels are in the same process, and have operators of their own.
    for attend in (
        lambda *tensors: relative_attention(*tensors, **options)[0],
        lambda *tensors: relative_attention(*tensors, **options, implementation="txl_triton")[0],
        lambda *tensors: kernel.relative_attention(*tensors, **options),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = attend(*leaves)
        results.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], atol=1e-5, rtol=1e-5)
try:
    kernel.relative_attention(query, key, value, future=20, score_bias=torch.zeros(1, 1, L, K))
except ValueError as error:
    print(error)
"""


def test_kernels_loads_the_folder_which_computes_the_same_by_itself(tmp_path):
    hub_kernel.main(["--output", str(tmp_path)])
    command, interpreted = [sys.executable, "-c", CODE, str(tmp_path)], os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=interpreted, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "score_bias" in result.stdout
