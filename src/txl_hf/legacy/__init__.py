"""Readers of the old files that transformers no longer reads: pickled vocabularies, and pickles without running them.

This wing imports `transfo_xl` and nothing else of the package. Importing it lets the tokenizer read `vocab.pkl` and
`vocab.bin`.
"""

from ..transfo_xl.tokenization_transfo_xl_backend import VOCABULARY_READERS
from .vocabulary import read_vocab_pickle

VOCABULARY_READERS["pickle"] = read_vocab_pickle
