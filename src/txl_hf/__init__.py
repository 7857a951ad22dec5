"""Transformer-XL for today's Hugging Face ecosystem.

Importing the package registers Transformer-XL with the Auto classes of `transformers`. It imports neither these nor
torch, which would take seconds: public names come from their modules when they are first asked for, and the classes
are registered when somebody imports the Auto classes (`registration`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .registration import register_when_imported

if TYPE_CHECKING:
    from .adaptation import DynamicEvaluation, GradientStatistics
    from .cache_transfo_xl import MemoryCache, StaticMemoryCache
    from .configuration_transfo_xl import TransfoXLConfig
    from .continuous_cache import ContinuousCache
    from .evaluation import evaluate_language_model, token_losses
    from .memory_transfo_xl import MemoryLengths, mask_overflow
    from .modeling_transfo_xl import (
        TransfoXLForCausalLM,
        TransfoXLForSequenceClassification,
        TransfoXLForTokenClassification,
        TransfoXLLMHeadModel,
        TransfoXLModel,
        TransfoXLPreTrainedModel,
    )
    from .regularization import regularize
    from .regularization_arguments import RegularizationArguments
    from .streams import TokenStream
    from .text_stream import TextStream
    from .tokenization_transfo_xl import TransfoXLTokenizer
    from .trainer import TransfoXLTrainer

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
    "evaluate_language_model",
    "mask_overflow",
    "regularize",
    "token_losses",
]

# The modules of the names above; a test compares them with what type checkers are told.
_MODULES = {
    "ContinuousCache": "continuous_cache",
    "DynamicEvaluation": "adaptation",
    "GradientStatistics": "adaptation",
    "MemoryCache": "cache_transfo_xl",
    "MemoryLengths": "memory_transfo_xl",
    "RegularizationArguments": "regularization_arguments",
    "StaticMemoryCache": "cache_transfo_xl",
    "TextStream": "text_stream",
    "TokenStream": "streams",
    "TransfoXLConfig": "configuration_transfo_xl",
    "TransfoXLForCausalLM": "modeling_transfo_xl",
    "TransfoXLForSequenceClassification": "modeling_transfo_xl",
    "TransfoXLForTokenClassification": "modeling_transfo_xl",
    "TransfoXLLMHeadModel": "modeling_transfo_xl",
    "TransfoXLModel": "modeling_transfo_xl",
    "TransfoXLPreTrainedModel": "modeling_transfo_xl",
    "TransfoXLTokenizer": "tokenization_transfo_xl",
    "TransfoXLTrainer": "trainer",
    "evaluate_language_model": "evaluation",
    "mask_overflow": "memory_transfo_xl",
    "regularize": "regularization",
    "token_losses": "evaluation",
}

register_when_imported()


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
