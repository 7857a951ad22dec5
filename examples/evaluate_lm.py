"""Score a text with a Transformer-XL at any memory length: `txl-evaluate`, from a clone.

    python examples/evaluate_lm.py --model runs/wikitext-2 --data data/wikitext-2 --memory_length 0 150 300

`--help` explains it; the code is `txl_hf.commands.evaluate_lm`.
"""

from txl_hf.commands import evaluate as main

if __name__ == "__main__":
    main()
