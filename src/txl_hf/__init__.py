"""Transformer-XL for today's Hugging Face ecosystem.

Importing the package registers Transformer-XL with the Auto classes of `transformers`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .configuration_transfo_xl import TransfoXLConfig
from .modeling_transfo_xl import (
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLLMHeadModel,
    TransfoXLModel,
    TransfoXLPreTrainedModel,
)

__all__ = [
    "TransfoXLConfig",
    "TransfoXLForCausalLM",
    "TransfoXLForSequenceClassification",
    "TransfoXLLMHeadModel",
    "TransfoXLModel",
    "TransfoXLPreTrainedModel",
]

AutoConfig.register(TransfoXLConfig.model_type, TransfoXLConfig)
AutoModel.register(TransfoXLConfig, TransfoXLModel)
AutoModelForCausalLM.register(TransfoXLConfig, TransfoXLForCausalLM)
AutoModelForSequenceClassification.register(TransfoXLConfig, TransfoXLForSequenceClassification)

TransfoXLConfig.register_for_auto_class()
TransfoXLModel.register_for_auto_class("AutoModel")
TransfoXLForCausalLM.register_for_auto_class("AutoModelForCausalLM")
TransfoXLForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
