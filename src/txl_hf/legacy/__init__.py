"""Readers of old pickles, which run nothing. Importing this lets the tokenizer read `vocab.pkl` and `vocab.bin`."""

from ..transfo_xl.tokenization_transfo_xl_backend import VOCABULARY_READERS
from .vocabulary import read_vocab_pickle

VOCABULARY_READERS["pickle"] = read_vocab_pickle
