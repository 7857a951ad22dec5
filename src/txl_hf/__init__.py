"""Transformer-XL for today's Hugging Face ecosystem.

Importing the package registers Transformer-XL with the Auto classes of `transformers`.
"""

from typing import TYPE_CHECKING

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from .adaptation import DynamicEvaluation
from .configuration_transfo_xl import TransfoXLConfig
from .continuous_cache import ContinuousCache
from .evaluation import evaluate_language_model, token_losses
from .memory_transfo_xl import MemoryLengths
from .modeling_transfo_xl import (
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLForTokenClassification,
    TransfoXLLMHeadModel,
    TransfoXLModel,
    TransfoXLPreTrainedModel,
)
from .regularization import RegularizationArguments, regularize
from .streams import TokenStream
from .text_stream import TextStream
from .tokenization_transfo_xl import TransfoXLTokenizer

if TYPE_CHECKING:
    from .trainer import TransfoXLTrainer

__version__ = "0.1.0"

__all__ = [
    "ContinuousCache",
    "DynamicEvaluation",
    "MemoryLengths",
    "RegularizationArguments",
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
    "evaluate_language_model",
    "regularize",
    "token_losses",
]

AutoConfig.register(TransfoXLConfig.model_type, TransfoXLConfig)
AutoModel.register(TransfoXLConfig, TransfoXLModel)
AutoModelForCausalLM.register(TransfoXLConfig, TransfoXLForCausalLM)
AutoModelForSequenceClassification.register(TransfoXLConfig, TransfoXLForSequenceClassification)
AutoModelForTokenClassification.register(TransfoXLConfig, TransfoXLForTokenClassification)
AutoTokenizer.register(TransfoXLConfig, fast_tokenizer_class=TransfoXLTokenizer)

TransfoXLConfig.register_for_auto_class()
TransfoXLModel.register_for_auto_class("AutoModel")
TransfoXLForCausalLM.register_for_auto_class("AutoModelForCausalLM")
TransfoXLForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
TransfoXLForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
TransfoXLTokenizer.register_for_auto_class()


def __getattr__(name: str):
    # Training alone needs what `transformers.Trainer` imports.
    if name == "TransfoXLTrainer":
        from .trainer import TransfoXLTrainer

        return TransfoXLTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
