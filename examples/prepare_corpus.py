"""Tokenise a corpus into Arrow, with the conventions of the published results: `txl-prepare`, from a clone.

    python examples/prepare_corpus.py --corpus wikitext-2 --output data/wikitext-2

`--help` explains it; the code is `txl_hf.commands.prepare_corpus`.
"""

from txl_hf.commands import prepare as main

if __name__ == "__main__":
    main()
