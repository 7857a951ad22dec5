"""Transformer-XL for today's Hugging Face ecosystem."""
