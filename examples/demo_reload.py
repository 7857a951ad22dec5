"""A user's part of the demo, with its folder alone: load it through the Auto classes and continue a text with memory.

    python examples/demo_reload.py FOLDER PROMPT.txt OUTPUT.pt {with,without}

The last argument says whether txl_hf is installed: without it, the code comes from the folder. OUTPUT.pt holds the
log-probabilities of the prompt, (1, L, V), and its continuation, both computed in float64: the package's kernels and
PyTorch's operators round float32 differently.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("package", choices=["with", "without"])
    arguments = parser.parse_args()
    if arguments.package == "with":
        import txl_hf  # noqa: F401 -- registers Transformer-XL with the Auto classes
    else:
        sys.modules["txl_hf"] = None  # from now on it cannot be imported

    trust_remote_code = arguments.package == "without"
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder, trust_remote_code=trust_remote_code)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.folder, dtype=torch.float64, trust_remote_code=trust_remote_code
    )
    inputs = tokenizer(arguments.prompt.read_text(encoding="utf-8"), return_tensors="pt")
    with torch.no_grad():
        log_probs = model(**inputs).logits
    torch.manual_seed(0)
    text = model.generate(**inputs, max_new_tokens=400, do_sample=True, temperature=0.9)
    continuation = tokenizer.decode(text[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    torch.save({"log_probs": log_probs, "continuation": continuation}, arguments.output)


if __name__ == "__main__":
    main()
