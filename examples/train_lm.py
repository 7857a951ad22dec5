"""Train a Transformer-XL language model from a recipe; `txl-train` is the same command, installed.

    python examples/train_lm.py examples/recipes/wikitext2.yaml --data DIR --output DIR
    python examples/train_lm.py examples/recipes/wikitext2.yaml --data DIR --output DIR --resume
    accelerate launch --config_file examples/launch/eight_gpus.yaml examples/train_lm.py RECIPE --data … --output …
    python examples/train_lm.py examples/recipes/ptb.yaml --smoke

src/txl_hf/training is what it does: a recipe read into `TransfoXLTrainer`.
"""

from txl_hf.commands import train as main

if __name__ == "__main__":
    main()
