"""Write the loss trajectories of legacy Transformer-XL that training/test_trajectory.py follows, and their starts.

Run by hand, in an environment with transformers 4.35.2:

    python tests/golden/make_trajectory.py

For each configuration a small seeded model is written beside this file as legacy transformers saves it, then trained
for 30 steps of SGD on trajectory/text.txt with its memory carried from step to step.
"""

import json
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers import TransfoXLConfig, TransfoXLLMHeadModel

FOLDER = Path(__file__).parent / "trajectory"
STEPS, STREAMS, SEGMENT = 30, 2, 16
SIZES = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "n_layer": 3, "dropout": 0.0, "dropatt": 0.0}
# untie_r, because legacy transformers cannot write biases that layers share as safetensors.
MODELS = {
    "word": {"cutoffs": [60, 180], "div_val": 2, "d_embed": 32, "mem_len": 24, "clamp_len": -1, "same_length": False},
    "char": {"cutoffs": [], "div_val": 1, "d_embed": 32, "mem_len": 40, "clamp_len": 20, "same_length": True},
}
RUNS = {
    # All targets, as the streams of the original give them.
    "plain": {"learning_rate": 0.3, "max_grad_norm": 0.0, "labels": "shift_labels"},
    "clipped": {"learning_rate": 1.0, "max_grad_norm": 0.25, "labels": "shift_labels"},
    # What the legacy model makes of labels: the last token of a segment predicts nothing.
    "shifted inside": {"learning_rate": 0.3, "max_grad_norm": 0.0, "labels": "labels"},
}


def token_ids(symbols: list[str]) -> list[int]:
    """Numbers for symbols, the most frequent first."""
    rank = {symbol: i for i, (symbol, _) in enumerate(Counter(symbols).most_common())}
    return [rank[symbol] for symbol in symbols[: STEPS * STREAMS * SEGMENT + 1]]


def loss_of(model: TransfoXLLMHeadModel, inputs: torch.Tensor, targets: torch.Tensor, mems, labels: str):
    if labels == "labels":
        output = model(inputs, labels=inputs, mems=mems)
        return output.losses.mean(), output.mems
    output = model.transformer(inputs, mems=mems)
    # The softmax shifts labels against states: one of each more and none is lost.
    hidden = torch.nn.functional.pad(output.last_hidden_state, (0, 0, 0, 1))
    return model.crit(hidden, torch.nn.functional.pad(targets, (1, 0))).mean(), output.mems


def trajectory(folder: Path, ids: list[int], learning_rate: float, max_grad_norm: float, labels: str) -> list[float]:
    model = TransfoXLLMHeadModel.from_pretrained(folder).train()
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    text, mems, losses = torch.tensor(ids), None, []
    inputs, targets = text[:-1].view(STREAMS, -1), text[1:].view(STREAMS, -1)
    for segment in zip(inputs.split(SEGMENT, dim=1), targets.split(SEGMENT, dim=1), strict=True):
        loss, mems = loss_of(model, *segment, mems, labels)
        optimizer.zero_grad()
        loss.backward()
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    text = (FOLDER / "text.txt").read_text()
    for name, settings in MODELS.items():
        ids = token_ids(text.split() if name == "word" else list(text))
        torch.manual_seed(0)
        config = TransfoXLConfig(
            vocab_size=max(ids) + 1, untie_r=True, init_std=0.1, proj_init_std=0.1, eos_token_id=0, **SIZES, **settings
        )
        TransfoXLLMHeadModel(config).save_pretrained(FOLDER / name, safe_serialization=True)
        written = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "segment_length": SEGMENT,
            "batch_size": STREAMS,
            "token_ids": ids,
            "runs": {
                run: {**arguments, "losses": trajectory(FOLDER / name, ids, **arguments)}
                for run, arguments in RUNS.items()
            },
        }
        (FOLDER / name / "trajectory.json").write_text(json.dumps(written, indent=None) + "\n")
        for run, found in written["runs"].items():
            print(name, run, found["losses"][0], found["losses"][-1])


if __name__ == "__main__":
    main()
