"""Learned memory tokens (Recurrent Memory Transformer, Bulatov et al., 2022) around a model without any memory.

    python examples/by_feature/memory_tokens.py --output memory-tokens.csv
    python examples/by_feature/memory_tokens.py --smoke

A segment stands between n vectors that it reads and n that it writes (Section 3 of https://arxiv.org/abs/2207.06881);
what the last layer returns for the latter is read by the next segment, with its graph. The task is copying: four
symbols are in the first segment, and asked for in the last, with nothing in between. As in the paper, the number of
segments grows once the task is learned, up to --segments. Beside it stands Transformer-XL, whose memory also keeps its
graph over all segments: each layer reads what entered it before, so that nothing comes from further back than the
layers reach, n_layer × (M + L - 1) tokens, while memory tokens go through all layers once more in every segment.
"""

import time
from pathlib import Path

import common
from txl_hf.command_line import at_least_one, new_path, positive

KINDS = ("tokens", "states")
PARSER = common.Parser(__doc__)
PARSER.add_argument("--output", type=new_path, required=True, help="a new CSV file, with a row for each training")
PARSER.add_argument("--memory", choices=KINDS, nargs="+", default=KINDS, help="memory tokens, or the model's own")
PARSER.add_argument("--seeds", type=at_least_one, nargs="+", default=[1, 2, 3], help="(1 2 3)")
PARSER.add_argument("--segments", type=at_least_one, default=9, help="from the symbols to the answer (%(default)s)")
PARSER.add_argument("--size", type=at_least_one, default=4, help="memory tokens, or states M (%(default)s)")
PARSER.add_argument("--steps", type=at_least_one, default=600, help="at most (%(default)s)")
PARSER.add_argument("--rows", type=at_least_one, default=32, help="texts of a step (%(default)s)")
PARSER.add_argument("--learning_rate", type=positive, default=2e-3, help="(%(default)s)")

if __name__ == "__main__":
    PARSER.refuse_first()

import torch
from torch import Tensor, nn

from txl_hf import TransfoXLForCausalLM
from txl_hf.memories import memory_of

SYMBOLS, COPIED, END = 8, 4, 50
# Tokens beside the symbols: nothing to remember, and the beginning of the answer.
BLANK, ANSWER = SYMBOLS, SYMBOLS + 1


def smoke(folder: Path) -> list[str | Path]:
    return ["--output", folder / "memory-tokens.csv", "--segments", "3", "--steps", "250", "--seeds", "1"]


class MemoryTokens(nn.Module):
    """A language model that reads (B, n, D) vectors before its segment, and writes as many behind it."""

    def __init__(self, size: int):
        super().__init__()
        self.model = TransfoXLForCausalLM(common.small_config(SYMBOLS + 2, 64, mem_len=0, init_std=0.05))
        self.start, self.written = (nn.Parameter(0.05 * torch.randn(size, 64)) for _ in range(2))

    def forward(self, ids: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, L, V) log-probabilities of (B, L) tokens, and the memory of the next segment."""
        n, rows = len(self.start), (len(ids), -1, -1)
        read = self.start.expand(rows) if memory is None else memory
        embeds = torch.cat([read, self.model.get_input_embeddings()(ids), self.written.expand(rows)], dim=1)
        outputs = self.model(inputs_embeds=embeds, output_hidden_states=True)
        return outputs.logits[:, n:-n], outputs.hidden_states[-1][:, -n:]


class MemoryStates(nn.Module):
    """Transformer-XL with a memory of M states, which keep their graph."""

    def __init__(self, size: int):
        super().__init__()
        self.model = TransfoXLForCausalLM(common.small_config(SYMBOLS + 2, 64, mem_len=size, init_std=0.05))

    def forward(self, ids: Tensor, memory: dict | None) -> tuple[Tensor, dict]:
        outputs = self.model(ids, **(memory or {}), detach_mems=False)
        return outputs.logits, memory_of(outputs)


def copy(model: nn.Module, rows: int, segments: int) -> tuple[Tensor, float]:
    """The mean loss of copying over so many segments, and the part of the symbols that are right."""
    symbols = torch.randint(SYMBOLS, (rows, COPIED))
    first, blank = torch.cat([torch.full((rows, 1), BLANK), symbols], dim=1), torch.full((rows, 1 + COPIED), BLANK)
    _, memory = model(first, None)
    for _ in range(segments - 2):
        _, memory = model(blank, memory)
    logits, _ = model(torch.cat([torch.full((rows, 1), ANSWER), symbols[:, :-1]], dim=1), memory)
    losses = -logits.gather(-1, symbols[..., None])
    return losses.mean(), float((logits.argmax(-1) == symbols).double().mean())


def train(model: nn.Module, options) -> tuple[int, int]:
    """Steps, and segments, with which it ended. After 20 steps with 99 % right texts have a segment more; of the last
    number of segments `END` steps follow, over which the learning rate falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    segments, recent, left = 2, list[float](), END
    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1, step / 50, left / END)
        loss, right = copy(model, options.rows, segments)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = [*recent[-19:], right]
        is_learned = len(recent) == 20 and sum(recent) > 0.99 * 20
        if is_learned and segments < options.segments:
            segments, recent = segments + 1, []
        elif is_learned or left < END:
            left -= 1
            if left == 0:
                break
    return step, segments


def main():
    options = common.parse_arguments(PARSER, smoke)
    rows = []
    for seed in options.seeds:
        for kind in options.memory:
            torch.manual_seed(seed)
            started = time.perf_counter()
            model = (MemoryTokens if kind == "tokens" else MemoryStates)(options.size)
            steps, segments = train(model, options)
            with torch.no_grad():
                right = copy(model.eval(), 1000, options.segments)[1]
            seconds = time.perf_counter() - started
            print(
                f"{kind}, seed {seed}: {right:.4f} right over {options.segments} segments ({1 / SYMBOLS} by chance), "
                f"trained with {segments} at the end of {steps} steps, {seconds:.0f} s",
                flush=True,
            )
            row = {"memory": kind, "size": options.size, "seed": seed, "segments": options.segments, "steps": steps}
            rows.append({**row, "last_segments": segments, "accuracy": f"{right:.4f}", "seconds": f"{seconds:.0f}"})
    common.write_rows(options.output, rows)


if __name__ == "__main__":
    main()
