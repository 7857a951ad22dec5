"""The paper's table of evaluation speed: streaming with memory against a vanilla Transformer's sliding window.

    python benchmarks/sliding_window.py                              # 12 layers of 512
    python benchmarks/sliding_window.py --model enwik8-large         # 24 layers, for a GPU
    python benchmarks/sliding_window.py --segments 128 1024          # longer passes, which a GPU needs to be filled
    python benchmarks/sliding_window.py --same-length                # with exactly as many tokens before each

Both models have the same layers and see at least as many tokens (Dai et al., 2019, Section 4.5; its Table 9 gives no
depth). With memory, one pass scores a segment of 128 tokens, or of as many as are asked for; a vanilla Transformer
scores one token, because its positions do not shift, and computes the whole window again for the next. It is as fast
as calls of a model are: causal SDPA without a mask tensor, logits of the last position alone. There are two of it, of
which the faster one counts: our layers with sinusoids added to the input (`attn_type` 2, without a relative term) and
transformers' GPT-2. Neither they nor the memory are read by a captured graph.

First the gate: the memory as keys and values gives the losses of the memory as states under eager, and the vanilla
passes give those of `evaluate_language_model` with `segment_length=1`, no memory and `ext_len = window - 1`.
"""

import argparse
import sys

import harness
import model as models

SEGMENTS = [128]
# Attention length: how many times faster in the paper.
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
SMOKE = {24: None, 48: None}
GATE_WINDOW, GATE_TOKENS = 16, 24
VANILLA = ("vanilla", "gpt2")


def main(given: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_arguments(parser, "sliding_window.csv", budget=25.0)
    parser.add_argument("--model", choices=models.MODELS, default="enwik8")
    parser.add_argument("--segments", type=int, nargs="+", default=SEGMENTS, help="tokens in a pass (%(default)s)")
    parser.add_argument(
        "--same-length", action="store_true", help="each token sees the attention length, not up to a segment more"
    )
    parser.add_argument("--implementation", help="what reads the memory, instead of the default: txl_triton, …")
    arguments = parser.parse_args(given)
    harness.complete(arguments)
    name, lengths, segments = arguments.model, PAPER, arguments.segments
    if arguments.smoke:
        name, lengths, segments = "smoke", SMOKE, [8]
    config = models.MODELS[name] | {"mem_len": max(lengths)}
    contenders = build(config, max(lengths), arguments)
    difference = gate(contenders, config, segments[0], arguments)
    # The longest window first: it is what the paper is known for.
    for length in sorted(lengths, reverse=True):
        for segment in segments:
            times = measure(contenders, config, length, segment, arguments)
            rows = describe(name, length, segment, lengths[length], times, difference, arguments)
            harness.append(arguments.output, rows)


def build(config: dict, positions: int, arguments: argparse.Namespace) -> dict:
    import torch

    from txl_hf import TransfoXLConfig, TransfoXLForCausalLM

    torch.manual_seed(0)
    alone = {"same_length": arguments.same_length, "attn_implementation": arguments.implementation}
    contenders = {
        "memory": TransfoXLForCausalLM(TransfoXLConfig(**config | alone)),
        "vanilla": models.floor(config | {"mem_len": 0}),
        "gpt2": models.gpt2(config, positions),
    }
    dtype = harness.torch_dtype(arguments.dtype)
    return {name: model.to(arguments.device, dtype).eval() for name, model in contenders.items()}


def vanilla_pass(model, window):
    """Log-probabilities of the token after a window, (V,)."""
    import torch

    with torch.no_grad():
        return model(window, use_cache=False, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)


def stream(model, ids, segment: int, cached: bool):
    """Yields the losses (L,) of one segment after the other, without an end."""
    import torch

    past, count = {}, 0
    while True:
        start = count % (len(ids) // segment) * segment
        piece = ids[None, start : start + segment]
        with torch.no_grad():
            output = model(piece, labels=piece, use_cache=cached, output_logits=False, **past)
        past = {"past_key_values": output.past_key_values} if cached else {"mems": output.mems}
        count += 1
        yield output.losses[0].float()


def gate(contenders: dict, config: dict, segment: int, arguments: argparse.Namespace) -> float:
    """The largest difference between mean losses in both checks; ends the program if one is too large."""
    import torch

    from txl_hf import evaluate_language_model

    memory, vanilla = contenders["memory"], contenders["vanilla"]
    ids = harness.draw_ids(config["vocab_size"], (4 * segment,)).to(arguments.device)
    means = {}
    chosen = memory.config._attn_implementation
    for name, implementation in ((True, chosen), (False, "eager")):
        memory.set_attn_implementation(implementation)
        losses = stream(memory, ids, segment, cached=name)
        means[name] = torch.stack([next(losses) for _ in range(4)]).mean().item()
    memory.set_attn_implementation(chosen)

    tokens = ids[:GATE_TOKENS]
    passes = [
        -vanilla_pass(vanilla, tokens[None, max(0, end - GATE_WINDOW) : end])[tokens[end]].item()
        for end in range(1, GATE_TOKENS)
    ]
    plain = vanilla.config._attn_implementation
    vanilla.set_attn_implementation("eager")
    vanilla.config.ext_len = GATE_WINDOW - 1
    result = evaluate_language_model(vanilla, tokens.cpu(), segment_length=1, memory_length=0)
    vanilla.config.ext_len = 0
    vanilla.set_attn_implementation(plain)

    differences = [abs(means[True] - means[False]), abs(sum(passes) / len(passes) - result.nll)]
    tolerance = models.TOLERANCE["fp32"]["evaluate"] if arguments.dtype == "fp32" else models.COARSE["evaluate"]
    if not all(difference <= tolerance for difference in differences):
        sys.exit(
            f"error: losses differ by {differences}: streaming from eager's, the vanilla pass from the protocol's"
        )
    print(f"gate: streaming is {differences[0]:.1e} off eager, the vanilla pass {differences[1]:.1e} off its protocol")
    return max(differences)


def measure(contenders: dict, config: dict, length: int, segment: int, arguments: argparse.Namespace) -> dict:
    """Seconds for each token, turn by turn."""
    memory = contenders["memory"]
    memory.reset_memory_length(length)
    ids = harness.draw_ids(config["vocab_size"], (length + segment,)).to(arguments.device)
    streaming = stream(memory, ids, segment, cached=True)
    calls = {"memory": lambda: next(streaming)}
    for name in VANILLA:
        calls[name] = lambda model=contenders[name]: vanilla_pass(model, ids[None, :length])
    # The first two segments open the memory.
    next(streaming)
    times = harness.interleave(calls, arguments.device, arguments.seconds, *arguments.repeats)
    return times | {"memory": [time / segment for time in times["memory"]]}


def describe(name, length, segment, paper, times, difference, arguments: argparse.Namespace) -> list[dict]:
    # By the same median as the rows, since those of few times and of their rates may disagree.
    fastest = max(VANILLA, key=lambda contender: harness.quantiles([1 / time for time in times[contender]])[1])
    ratios = [slow / fast for slow, fast in zip(times[fastest], times["memory"], strict=True)]
    low, middle, high = harness.quantiles(ratios)
    rows = []
    for contender, spent in times.items():
        row = harness.origin(arguments.device, arguments.dtype, arguments.threads)
        row |= harness.versions() | {
            "model": name,
            "attention_length": length,
            "segment": segment,
            "contender": contender,
            # Of the whole run, although only the memory is read by it.
            "implementation": arguments.implementation or "",
            "same_length": arguments.same_length or "",
        }
        rates = harness.quantiles([1 / time for time in spent])
        row |= {
            f"tokens_per_second_p{p}": harness.significant(rate) for p, rate in zip((20, 50, 80), rates, strict=True)
        }
        row |= {"repeats": len(spent), "nll_difference": f"{difference:.1e}"}
        if contender == "memory":
            row |= {"over": fastest, "paper": paper or ""}
            row |= {
                f"times_p{p}": harness.significant(t) for p, t in zip((20, 50, 80), (low, middle, high), strict=True)
            }
        rows.append(row)
    print(
        f"{name} attention length {length}: {1 / harness.quantiles(times['memory'])[1]:.1f} tokens/s with memory, "
        f"{middle:,.0f} times {fastest}'s sliding window (paper: {paper})",
        flush=True,
    )
    return rows


if __name__ == "__main__":
    main()
