"""What PyTorch's attention does with a bias where no gradient is asked for: which kernel, how fast, how far off.

    python benchmarks/cudnn_probe.py --device cuda --output cudnn_probe.txt

On Hopper PyTorch may give bf16 attention with a bias to cuDNN, which plans anew for every number of keys: the time of
the first call with a number is printed beside that of the second. Lengths are those that decoding and streaming meet.
"""

import argparse
from functools import partial

import harness

PAIRS = [*((1, keys) for keys in (1, 2, 3, 5, 8, 13, 20)), (3, 67), (65, 365), (150, 300), (192, 384)]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "cudnn_probe.txt", budget=0.0)
    arguments = parser.parse_args(given)
    harness.complete(arguments)
    lines = [describe(queries, keys, arguments) for queries, keys in PAIRS]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(f"{line}\n" for line in lines))
    return 0


def describe(queries: int, keys: int, arguments: argparse.Namespace) -> str:
    import torch

    from txl_hf.attention_transfo_xl import relative_attention

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(arguments.device, dtype)

    generator, dtype = torch.Generator().manual_seed(0), harness.torch_dtype(arguments.dtype)
    inputs = [draw(1, 2, queries, 64), draw(1, 2, keys, 64), draw(1, 2, keys, 64), draw(2, keys, 64)]
    inputs += [draw(2, 64), draw(2, 64)]
    found = []
    for name in ("sdpa", "auto"):
        try:
            with torch.no_grad():
                attend = partial(relative_attention, *inputs, implementation=name)
                times = [harness.seconds(attend, arguments.device) for _ in range(2)]
                result, _ = attend()
                exact, _ = relative_attention(*(tensor.double() for tensor in inputs), implementation="eager")
            error = ((result.double() - exact).norm() / exact.norm()).item()
            found.append(f"{name} {times[0] * 1e3:.3f} ms, then {times[1] * 1e3:.3f} ms, error {error:.1e}")
        except RuntimeError as error:
            found.append(f"{name} fails: {str(error).splitlines()[0]}")
    line = f"L {queries} K {keys}: " + "; ".join(found)
    print(line, flush=True)
    return line


if __name__ == "__main__":
    raise SystemExit(main())
