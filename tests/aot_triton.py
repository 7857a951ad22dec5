"""Compile the kernels ahead of time, without a GPU, and print what they use as one JSON object a line.

    python tests/aot_triton.py [--capability 90] [--dtypes bfloat16] [--widths 64] [--dropout 0.1] [--tile 64,64,8,2] …

The whole path runs on CPU tensors, from `torch.autograd.grad` down to Triton's own argument binding; a driver that
only names a GPU takes the place of CUDA's, and kernels are compiled where they would be launched. Registers and shared
memory limit how many programs share a multiprocessor (65,536 registers; 227 KiB on sm_90, 163 on sm_80, 99 on sm_86
and sm_89); a program that wants more memory than that does not start.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import txl_hf.kernels.attention_triton as kernels
import txl_hf.kernels.softmax_triton as softmax
from sass import instructions_of, longest_inner_loop, overwritten_operands, without_predicate
from txl_hf.transfo_xl.attention_transfo_xl import AttentionInputs

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class NamedGPU:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def resources(compiled, capability: int) -> dict:
    """Registers of a thread, its stack in bytes, and counts of instructions in a kernel's machine code."""
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])

        def dump(option):
            return subprocess.run(
                [NVIDIA_TOOLS / "cuobjdump", option, cubin], check=True, capture_output=True, text=True
            ).stdout

        usage, code = dump("--dump-resource-usage"), dump("--dump-sass")
        ptx = Path(directory, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        # Where there are two, the newer one is named after the newer hardware.
        ptxas = max(NVIDIA_TOOLS.glob("ptxas*"))
        command = [ptxas, f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}", "-v", ptx, "-o", "/dev/null"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    opcodes = [re.match(r"[A-Z0-9]+", without_predicate(text))[0] for text in instructions_of(code).values()]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "spills": sum(opcode in ("STL", "LDL") for opcode in opcodes),
        "serialized": "wgmma.mma_async instructions are serialized" in report,
        "shuffles": opcodes.count("SHFL"),
        "tensor_core": sum(opcode in ("HGMMA", "HMMA") for opcode in opcodes),
        "atomics": sum(opcode in ("RED", "REDG", "ATOMG", "ATOM") for opcode in opcodes),
        "instructions": len(opcodes),
        "loop": longest_inner_loop(code),
        "overwritten": overwritten_operands(code),
    }


def attend_and_differentiate(dtype, width, length, memory, window, future, dropout, masked, any_mask, bias, documents):
    B, H, K = 2, 2, memory + length
    distances = K + (future or 0)

    def tensor(*shape):
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    # Heads side by side for each position, as projections leave them.
    query, key, value = (tensor(B, n, H, width).transpose(1, 2) for n in (length, K, K))
    rel_key = tensor(distances, H, width).transpose(0, 1)
    content_bias, position_bias = tensor(H, width), tensor(H, width)
    leaves = [query, key, value, rel_key, content_bias, position_bias]
    rel_bias = tensor(H, distances) if bias else None
    key_mask = torch.ones(B, K, dtype=torch.bool) if masked else None
    inputs = AttentionInputs(
        query,
        key,
        value,
        scaling=width**-0.5,
        dropout=dropout,
        rel_key=rel_key,
        content_bias=content_bias,
        position_bias=position_bias,
        rel_bias=rel_bias,
        key_mask=key_mask,
        window=window,
        first_key=torch.zeros(B, length, dtype=torch.long) if documents else None,
        future=future,
        hidden=torch.zeros(B, 1, length, K, dtype=torch.bool) if any_mask else None,
    )
    output, _ = kernels.triton_relative_attention(inputs)
    torch.autograd.grad(output, leaves + ([rel_bias] if bias else []), torch.ones_like(output))


def normalise_and_differentiate(dtype, rows, columns):
    table = torch.zeros(columns, 16, dtype=dtype)
    logits = softmax.padded_product(torch.zeros(rows, 16, dtype=dtype), table, slice(0, columns))
    targets, bias = torch.zeros(rows, dtype=torch.long), torch.zeros(columns, dtype=dtype)
    softmax.add_statistics(logits, bias, targets, torch.zeros(2, rows), 0)
    softmax.write_gradient(logits, bias, targets, torch.zeros(rows), torch.zeros(rows), logits, 0, True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU: 80, 86, 89, 90, …")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--widths", nargs="+", type=int, default=[64])
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--memory", type=int, default=192)
    parser.add_argument("--window", type=int)
    parser.add_argument("--future", type=int, help="keys that a query sees after itself")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--masked", action="store_true")
    parser.add_argument("--any-mask", action="store_true", help="with --future, of queries and keys")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--documents", action="store_true", help="that begin inside the segment")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--one-backward-kernel", action="store_true", help="for all gradients, in place of two")
    parser.add_argument("--softmax", action="store_true", help="the kernels of the softmax instead of the attention's")
    parser.add_argument("--tile", help="queries,keys,warps,stages of all kernels instead of their own")
    parser.add_argument("--ptx", type=Path, help="folder to leave PTX in")
    arguments = parser.parse_args()

    triton.runtime.driver.set_active(NamedGPU(arguments.capability))
    # Only the compilation: there is nothing to launch on, and the tensors are on the CPU.
    kernels.why_not_triton = lambda query: None
    kernels._capability = lambda device: divmod(arguments.capability, 10)
    launch, compiled = JITFunction.run, {}

    def compile_only(self, *args, warmup, **kwargs):
        compiled[self.__name__] = launch(self, *args, warmup=True, **kwargs)

    JITFunction.run = compile_only
    if arguments.tile:
        names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
        own_tile, override = kernels._tile, dict(zip(names, map(int, arguments.tile.split(",")), strict=True))
        kernels._tile = lambda *args: own_tile(*args) | override
    torch.use_deterministic_algorithms(arguments.deterministic)
    kernels.ONE_BACKWARD_KERNEL = arguments.one_backward_kernel

    for dtype in arguments.dtypes:
        for width in arguments.widths:
            if arguments.softmax:
                normalise_and_differentiate(getattr(torch, dtype), 64, 19997)
            else:
                attend_and_differentiate(
                    getattr(torch, dtype),
                    width,
                    arguments.length,
                    arguments.memory,
                    arguments.window,
                    arguments.future,
                    arguments.dropout,
                    arguments.masked,
                    arguments.any_mask,
                    arguments.bias,
                    arguments.documents,
                )
            for name, kernel in compiled.items():
                print(
                    json.dumps(
                        {"kernel": name.removeprefix("_").removesuffix("_kernel"), "dtype": dtype, "width": width}
                        | resources(kernel, arguments.capability)
                    ),
                    flush=True,
                )
                if arguments.ptx:
                    arguments.ptx.mkdir(parents=True, exist_ok=True)
                    (arguments.ptx / f"{name}.ptx").write_text(kernel.asm["ptx"])
                    (arguments.ptx / f"{name}.ttgir").write_text(kernel.asm["ttgir"])
                    (arguments.ptx / f"{name}.cubin").write_bytes(kernel.asm["cubin"])


if __name__ == "__main__":
    main()
