"""Parakeet's encoder with the package's attention, beside transformers' own by sdpa and eager, in one process.

    python benchmarks/conformer.py                                  # 24 layers; 30 seconds, 5 and 10 minutes of audio
    python benchmarks/conformer.py --layers 2 --memory-only         # memory and equality alone
    python benchmarks/conformer.py --train 16                       # a training step of 16 utterances of half a minute

Sizes are those of Parakeet-0.6B, weights random. `encoder` is all of it; `attention` is one module of attention with
the frames that the convolutions leave, 12.5 a second. `training` is a forward and a backward pass of the encoder,
without dropout. Equality comes first: an output that is off by more than the tolerance ends the run. Peak memory is
that of a call beyond what the process held before it, weights among it; times are of the contenders in turn.
"""

import argparse
import sys

import harness
from growth import RESOLUTION, held

SMOKE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "subsampling_conv_channels": 8}
CONTENDERS = ["ours", "sdpa", "eager"]
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
FEATURES_A_SECOND = 100


def main(given: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "conformer.csv", budget=60.0)
    parser.add_argument("--layers", type=int, default=24, help="(%(default)s)")
    parser.add_argument("--audio", type=float, nargs="+", default=[30, 300, 600], help="seconds of it (30 300 600)")
    parser.add_argument(
        "--contenders", nargs="+", choices=["ours", "sdpa", "eager"], default=["ours", "sdpa", "eager"]
    )
    parser.add_argument("--memory-only", action="store_true", help="no times")
    parser.add_argument("--train", type=int, metavar="ROWS", help="also a training step of utterances of 30 seconds")
    arguments = parser.parse_args(given)
    harness.complete(arguments)
    if arguments.smoke:
        arguments.layers, arguments.audio = 1, [2.0, 4.0]
        arguments.train = arguments.train and 2
    origin = harness.origin(arguments.device, arguments.dtype, arguments.threads) | harness.versions()
    origin |= {"model": "smoke" if arguments.smoke else "parakeet-0.6b", "layers": arguments.layers}
    encoder = build(arguments)
    for seconds in arguments.audio:
        harness.append(arguments.output, [origin | row for row in measure(encoder, seconds, arguments)])
    if arguments.train:
        utterance = 2.0 if arguments.smoke else 30.0
        harness.append(arguments.output, [origin | row for row in measure(encoder, utterance, arguments, True)])


def build(arguments: argparse.Namespace):
    import torch
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    torch.manual_seed(0)
    sizes = SMOKE if arguments.smoke else {}
    config = ParakeetEncoderConfig(num_hidden_layers=arguments.layers, **sizes)
    return ParakeetEncoder(config).eval().to(arguments.device, harness.torch_dtype(arguments.dtype))


def measure(encoder, seconds: float, arguments: argparse.Namespace, trains: bool = False) -> list[dict]:
    import torch

    generator, batch = torch.Generator().manual_seed(0), arguments.train if trains else 1
    features = torch.randn(batch, int(seconds * FEATURES_A_SECOND), encoder.config.num_mel_bins, generator=generator)
    features = features.to(arguments.device, encoder.dtype)
    frames = int(encoder._get_subsampling_output_length(torch.tensor(features.shape[1])))
    states = torch.randn(1, frames, encoder.config.hidden_size, generator=generator).to(features)
    attention = {"hidden_states": states, "position_embeddings": encoder.encode_positions(states)}
    parts = {
        "encoder": lambda: encoder(features).last_hidden_state,
        "attention": lambda: encoder.layers[0].self_attn(**attention)[0],
    }
    if trains:
        parts = {f"training-b{batch}": lambda: train(encoder, features)}
    rows = []
    for part, compute in parts.items():
        calls = {name: turn(encoder, name, compute, trains) for name in arguments.contenders}
        outputs = {name: call() for name, call in calls.items()}
        own = [name for name in calls if name != "ours"]
        off = max(((outputs["ours"] - outputs[name]).abs().max().item() for name in own), default=0.0)
        largest = outputs["ours"].abs().max().item()
        if off > TOLERANCE[arguments.dtype] * max(1.0, largest):
            sys.exit(f"error: {part}, {seconds:g} s: ours is off by {off:.1e} from transformers' own")
        del outputs
        peaks = {name: peak_of(call, arguments.device) for name, call in calls.items()}
        times = None
        if not arguments.memory_only:
            times = harness.interleave(calls, arguments.device, arguments.seconds, *arguments.repeats)
        for name in calls:
            row = {"part": part, "audio_s": f"{seconds:g}", "frames": frames, "contender": name}
            row |= {"peak_mib": round(peaks[name], 1), "difference": f"{off:.1e}"}
            if times is not None:
                quantiles = zip((20, 50, 80), harness.quantiles(times[name]), strict=True)
                row |= {f"seconds_p{p}": harness.significant(s) for p, s in quantiles}
                row |= {"repeats": len(times[name])}
            rows.append(row)
        report(rows[-len(calls) :])
    return rows


def train(encoder, features):
    """Of a step, all but the optimiser's; the output."""
    encoder.zero_grad()
    output = encoder(features).last_hidden_state
    output.float().square().mean().backward()
    return output.detach()


def turn(encoder, name: str, compute, trains: bool):
    """The call as one contender makes it."""
    import torch

    from txl_hf.conformer import restore_attention, use_relative_attention

    def call():
        if name == "ours":
            use_relative_attention(encoder)
        else:
            restore_attention(encoder).set_attn_implementation(name)
        with torch.inference_mode(not trains):
            return compute()

    return call


def peak_of(call, device: str) -> float:
    """MiB of a call beyond what is held before it."""
    harness.reset_peak(device)
    before = held(device)
    call()
    return max(harness.peak_mib(device) - before, RESOLUTION["peak_mib"])


def report(rows: list[dict]) -> None:
    ours = next((row for row in rows if row["contender"] == "ours"), None)
    for row in rows:
        line = f"{row['part']:12} {row['audio_s']:>4} s {row['contender']:5} {row['peak_mib']:9.1f} MiB"
        line += f" {row['seconds_p50']:9.4f} s" if "seconds_p50" in row else ""
        if ours is not None and row is not ours:
            line += f"   ours: {ours['peak_mib'] / row['peak_mib']:.3f} of the memory"
            line += f", {row['seconds_p50'] / ours['seconds_p50']:.2f} times the speed" if "seconds_p50" in row else ""
        print(line, flush=True)


if __name__ == "__main__":
    main()
