"""Transformer-XL for today's Hugging Face ecosystem.

Importing the package registers Transformer-XL with the Auto classes of `transformers`, so that
`AutoModelForCausalLM.from_pretrained` loads its checkpoints. CONTRIBUTING.md says what each wing of the package holds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from . import kernels, legacy  # noqa: F401 -- they register themselves with the model and the tokenizer
from .data.memory_files import load_memory, save_memory
from .data.streams import TokenStream
from .data.text_stream import TextStream
from .evaluation.continuous_cache import ContinuousCache
from .evaluation.dynamic import DynamicEvaluation, GradientStatistics
from .evaluation.language_model import evaluate_language_model, token_losses
from .kernels.static_cache import StaticMemoryCache
from .memories import mask_overflow
from .training.regularization import RegularizationArguments, regularize
from .transfo_xl.cache_transfo_xl import MemoryCache
from .transfo_xl.configuration_transfo_xl import TransfoXLConfig
from .transfo_xl.memory_transfo_xl import MemoryLengths
from .transfo_xl.modeling_transfo_xl import (
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLForTokenClassification,
    TransfoXLLMHeadModel,
    TransfoXLModel,
    TransfoXLPreTrainedModel,
)
from .transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer

if TYPE_CHECKING:
    from .training.arguments import TransfoXLTrainingArguments
    from .training.trainer import TransfoXLTrainer

__version__ = "0.1.0"

__all__ = [
    "ContinuousCache",
    "DynamicEvaluation",
    "GradientStatistics",
    "MemoryCache",
    "MemoryLengths",
    "RegularizationArguments",
    "StaticMemoryCache",
    "TextStream",
    "TokenStream",
    "TransfoXLConfig",
    "TransfoXLForCausalLM",
    "TransfoXLForSequenceClassification",
    "TransfoXLForTokenClassification",
    "TransfoXLLMHeadModel",
    "TransfoXLModel",
    "TransfoXLPreTrainedModel",
    "TransfoXLTokenizer",
    "TransfoXLTrainer",
    "TransfoXLTrainingArguments",
    "evaluate_language_model",
    "load_memory",
    "mask_overflow",
    "regularize",
    "save_memory",
    "token_losses",
]

AutoConfig.register(TransfoXLConfig.model_type, TransfoXLConfig)
AutoTokenizer.register(TransfoXLConfig, fast_tokenizer_class=TransfoXLTokenizer)
TransfoXLConfig.register_for_auto_class("AutoConfig")
TransfoXLTokenizer.register_for_auto_class("AutoTokenizer")
for _auto, _model in (
    (AutoModel, TransfoXLModel),
    (AutoModelForCausalLM, TransfoXLForCausalLM),
    (AutoModelForSequenceClassification, TransfoXLForSequenceClassification),
    (AutoModelForTokenClassification, TransfoXLForTokenClassification),
):
    _auto.register(TransfoXLConfig, _model)
    # `save_pretrained` then writes the model's code beside the weights, for `trust_remote_code`.
    _model.register_for_auto_class(_auto.__name__)


def __getattr__(name: str):
    # Imported when asked for: transformers' Trainer imports accelerate, datasets and peft where they are there.
    modules = {"TransfoXLTrainer": "trainer", "TransfoXLTrainingArguments": "arguments"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".training.{modules[name]}", __name__), name)
