"""Print kernel, time and error of PyTorch's attention with a bias, in calls without gradients.

    python benchmarks/cudnn_probe.py --device cuda --output notes.txt

On Hopper PyTorch may give bf16 attention with a bias to cuDNN, which plans anew for every number of keys: the time of
the first call with a number is printed beside that of the second. Lengths are those that decoding and streaming meet.

    sdpa, auto       ours, which leave cuDNN out
    cudnn            scaled_dot_product_attention with the same bias and nothing but cuDNN to take

An error is a line too. A fault of a kernel leaves its process without a GPU: try cuDNN in one of its own.
"""

import argparse

import harness

PAIRS = [*((1, keys) for keys in (1, 2, 3, 5, 8, 13, 20)), (3, 67), (65, 365), (150, 300), (192, 384)]
CONTENDERS = ("sdpa", "auto", "cudnn")


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "cudnn_probe.txt", budget=0.0)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    arguments = parser.parse_args(given)
    harness.complete(arguments)
    if "cudnn" in arguments.contenders:
        offer_cudnn()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.contenders:
        for queries, keys in PAIRS:
            line = f"{name} L {queries} K {keys}: {describe(name, queries, keys, arguments)}"
            print(line, flush=True)
            with arguments.output.open("a") as file:
                file.write(f"{line}\n")
    return 0


def offer_cudnn():
    """Make "cudnn" an implementation of attention, which has no other kernel to fall back to."""
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import AttentionInterface

    def attend(module, query, key, value, mask, *, scaling, **options):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attended = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
        return attended.transpose(1, 2), None

    AttentionInterface.register("cudnn", attend)


def describe(name: str, queries: int, keys: int, arguments: argparse.Namespace) -> str:
    import torch

    from txl_hf.transfo_xl.attention_transfo_xl import relative_attention

    generator, dtype = torch.Generator().manual_seed(0), harness.torch_dtype(arguments.dtype)
    shapes = [(1, 2, queries, 64), (1, 2, keys, 64), (1, 2, keys, 64), (2, keys, 64), (2, 64), (2, 64)]
    results = []
    try:
        inputs = [torch.randn(shape, generator=generator).to(arguments.device, dtype) for shape in shapes]

        def attend():
            results[:] = relative_attention(*inputs, implementation=name)

        with torch.no_grad():
            times = [harness.seconds(attend, arguments.device) for _ in range(2)]
            exact, _ = relative_attention(*(tensor.double() for tensor in inputs), implementation="eager")
        off = ((results[0].double() - exact).norm() / exact.norm()).item()
    except RuntimeError as error:
        return f"fails: {str(error).strip().partition(chr(10))[0]}"
    return f"{times[0] * 1e3:.3f} ms, then {times[1] * 1e3:.3f} ms, error {off:.1e}"


if __name__ == "__main__":
    raise SystemExit(main())
