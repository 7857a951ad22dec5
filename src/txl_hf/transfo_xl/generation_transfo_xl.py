"""Methods that `generate` calls, for inputs of each step with a memory."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, StaticCache
from transformers.generation import GenerationMode, StopStringCriteria

from .attention_transfo_xl import OPERATORS
from .cache_transfo_xl import (
    CACHE_NAME,
    MemoryCache,
    cached_key_mask,
    chosen_cache,
    clear_hidden,
    is_filled,
    text_length,
)
from .configuration_transfo_xl import TransfoXLConfig
from .masks_transfo_xl import DOCUMENT_KEYWORDS, PACKED_KEYWORDS, check_inputs, packed_starts, zeros_in_front
from .memory_transfo_xl import MemoryLengths, check_one_memory, split_mask


class TransfoXLGenerationMixin(GenerationMixin):
    """`generate` with the memory as its cache, starting from `mems` if they are given; without a cache where
    `mem_len=0` or gradient checkpointing is on in training mode."""

    config: TransfoXLConfig

    def adjust_generation_fn(self, *args, **kwargs):
        super().adjust_generation_fn(*args, **kwargs)
        self._drop_output_logits()

    def _drop_output_logits(self):
        """Unset `generate`'s option `output_logits`, because it would take its value from our field of that name."""
        if self.generation_config._from_model_config and self.config.output_logits:
            self.generation_config.output_logits = None
            self.generation_config.return_dict_in_generate = False

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, batch_size, max_length):
        mem_len = self._mem_len(model_kwargs.get("lengths"))
        checkpointing = self.transformer.gradient_checkpointing and self.training
        if mem_len == 0 or checkpointing:
            if model_kwargs.get("inputs_embeds") is not None:
                reason = "gradient checkpointing in training mode" if checkpointing else "mem_len=0"
                raise ValueError(f"{reason} remembers no inputs_embeds from step to step: give generate input_ids")
            generation_config.use_cache = model_kwargs["use_cache"] = False
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                "assistant_early_exit drafts with the first layers, but the memory is of all: give an assistant_model"
            )
        if generation_config.is_assistant:
            # Dropped, because mems are states of the main model's layers, not of the assistant's.
            model_kwargs.pop("mems", None)
            model_kwargs.pop("mems_mask", None)
        cache = model_kwargs.get(CACHE_NAME)
        if cache is not None and is_filled(cache):
            check_one_memory(model_kwargs.get("mems"), model_kwargs.get("mems_mask"))
        if generation_config.prefill_chunk_size is not None:
            if model_kwargs.get("resets") is not None:
                raise ValueError("prefill_chunk_size cuts the text, but not where its documents begin: leave it out")
            if model_kwargs.get("inputs_embeds") is not None:
                raise ValueError("prefill_chunk_size cuts input_ids, but no inputs_embeds: leave it out")
            if cache is not None and cache.get_seq_length() != text_length(cache):
                # The loop over chunks skips as many tokens as the cache has keys, keys of no text included.
                raise ValueError(
                    f"past_key_values, a {type(cache).__name__}, began from a memory, which prefill_chunk_size would "
                    "take for text that was read: give a MemoryCache, or leave prefill_chunk_size out"
                )
        used = cache is not None and (cache.is_compileable or text_length(cache) > 0)
        if used and generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                "assisted decoding and prompt lookup read the whole text, and take tokens back, which a static cache "
                "cannot: leave past_key_values out, or give a MemoryCache that has seen nothing"
            )
        # M + 1 at least, because a static cache has all slots of the memory from the first step on.
        max_length = max(max_length, mem_len + 1)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, batch_size, max_length)
        cache = model_kwargs.get(CACHE_NAME)
        if type(cache) not in (DynamicCache, StaticCache) or cache.offloading or hasattr(cache, "_is_user_defined"):
            return
        if type(cache) is StaticCache:
            if OPERATORS.static_cache is not None:
                model_kwargs[CACHE_NAME] = OPERATORS.static_cache(self.config, mem_len)
        else:
            cache = model_kwargs[CACHE_NAME] = MemoryCache(self.config, mem_len)
            mask = model_kwargs.get("attention_mask")
            if mask is not None and not generation_config.is_assistant and bool(mask.all()):
                # The host waits for a GPU once, because each layer would apply the mask at every token.
                del model_kwargs["attention_mask"]
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def _mem_len(self, lengths: MemoryLengths | None) -> int:
        return (self.config if lengths is None else MemoryLengths.of(lengths, self.config)).mem_len

    def prepare_inputs_for_generation(
        self,
        input_ids,
        next_sequence_length=None,
        past_key_values=None,
        attention_mask=None,
        inputs_embeds=None,
        is_first_iteration=False,
        cache=None,
        **kwargs,
    ):
        # Without a cache `generate` takes mems for one, but each step reads the whole text.
        cache = chosen_cache(past_key_values, cache) if kwargs.get("use_cache", True) else None
        for name in ("tokenizer", "assistant_tokenizer"):
            # Dropped, because `generate` passes them to every call of the model.
            kwargs.pop(name, None)
        name, text = "input_ids", input_ids
        if inputs_embeds is not None and is_first_iteration:
            name, text = "inputs_embeds", inputs_embeds
        filled = cache is not None and is_filled(cache)
        if filled:
            kwargs.pop("mems", None)
            kwargs.pop("mems_mask", None)
            if is_first_iteration and next_sequence_length is not None:
                # `generate` counts all keys of the cache as text, but some may be memory from before the text.
                seen = text_length(cache)
                next_sequence_length += cache.get_seq_length() - seen
                if next_sequence_length <= 0:
                    raise ValueError(
                        f"{name} hold {text.shape[1]} tokens, but past_key_values have seen {seen} already: give the "
                        "whole text, those and the new ones, or the new input_ids alone with an attention_mask over "
                        "the whole text"
                    )
        length = next_sequence_length or text.shape[1]
        if filled and cache.is_compileable:
            mem_len = self._mem_len(kwargs.get("lengths"))
            attention_mask = self._mask_of_static_cache(
                cache, attention_mask, mem_len, input_ids, length, is_first_iteration
            )
        if (resets := kwargs.pop("resets", None)) is not None:
            if filled and is_first_iteration:
                # `resets`, like input_ids, cover the whole text or the tokens that the cache has not seen.
                kwargs["resets"] = resets[:, -length:]
            elif not filled:
                # False for tokens after the prompt, which continue its last document, in steps that read the whole
                # text, and in a first step with candidates.
                kwargs["resets"] = F.pad(resets, (0, text.shape[1] - resets.shape[1]))
        kwargs |= {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds, CACHE_NAME: cache}
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, is_first_iteration=is_first_iteration, **kwargs
        )

    def _mask_of_static_cache(
        self, cache: Cache, attention_mask: Tensor | None, mem_len: int, ids: Tensor, length: int, is_first: bool
    ) -> Tensor:
        """(B, m + L) bool, made outside the compiled forward and in one shape at every step."""
        m, mask = cached_key_mask(
            attention_mask, cache, mem_len, len(ids), length, memory_mask=None, is_grown=not is_first
        )
        if mask is None:
            return torch.ones(len(ids), m + length, dtype=torch.bool, device=ids.device)
        front = None
        if is_first:
            front = clear_hidden(cache, mask, attention_mask, length, self.config)
        elif self.config.initial_memory == "zeros":
            # Padding, which the cache holds as zero states that queries see.
            front = zeros_in_front(attention_mask, length, m + length)
        return mask if front is None else mask | front

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        given = input_ids, logits_processor, stopping_criteria, generation_config
        if OPERATORS.decode is not None and (texts := OPERATORS.decode(self, *given, kwargs)) is not None:
            return texts
        kwargs |= OPERATORS.loop_options(logits_processor, generation_config, kwargs)
        return super()._sample(*given, **kwargs)

    def _beam_search(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        kwargs |= OPERATORS.loop_options(logits_processor, generation_config, kwargs)
        return super()._beam_search(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

    @staticmethod
    def create_masks_for_generate(attention_mask=None, **kwargs) -> Tensor | None:
        """The mask unchanged, (B, n), because the attention itself computes which keys a query sees."""
        return attention_mask

    def _prepare_position_ids_for_generation(self, *args, **kwargs) -> None:
        """None, because the memory determines a step's position in the text."""

    def _prepare_model_inputs(self, *args, **kwargs):
        inputs, name, model_kwargs = super()._prepare_model_inputs(*args, **kwargs)
        cache = model_kwargs.pop("cache", None)
        chosen = chosen_cache(model_kwargs.get("past_key_values"), cache)
        if cache is not None:
            model_kwargs[CACHE_NAME] = chosen
        keywords = {name: model_kwargs.get(name) for name in DOCUMENT_KEYWORDS}
        check_inputs(keywords, resets=model_kwargs.get("resets"), **{name: inputs})
        letters = "(B, L, D)" if name == "inputs_embeds" else "(B, L)"
        if inputs.dim() != letters.count(",") + 1:
            raise ValueError(f"{name} are {tuple(inputs.shape)}, but generate needs a batch of texts, {letters}")
        shape, device = inputs.shape[:2], inputs.device
        mask, mems = model_kwargs.get("attention_mask"), model_kwargs.get("mems")
        if mask is not None and mems is not None and mask.dim() == 2 and mask.shape[1] > shape[1]:
            # Split before, because the loops of `generate` cut a mask as they cut the text.
            mem_len = self._mem_len(model_kwargs.get("lengths"))
            mems, mems_mask, mask = split_mask(self.config, mem_len, inputs, mems, model_kwargs.get("mems_mask"), mask)
            model_kwargs |= {"mems": mems, "mems_mask": mems_mask, "attention_mask": mask}
        cache = model_kwargs.get(CACHE_NAME)
        is_new = not isinstance(cache, Cache) or not is_filled(cache)
        documents = {name: model_kwargs.pop(name) for name in PACKED_KEYWORDS if model_kwargs.get(name) is not None}
        positions = model_kwargs.get("position_ids")
        if positions is not None and is_new and bool(packed_starts(shape, device, mask, positions).any()):
            # As `resets`, because a step cannot find its part of the text by positions that restart.
            documents["position_ids"] = model_kwargs.pop("position_ids")
        resets = model_kwargs.get("resets")
        if documents:
            starts = packed_starts(shape, device, mask, **documents)
            resets = model_kwargs["resets"] = starts if resets is None else resets | starts
        if resets is not None and is_new and resets.shape != shape:
            raise ValueError(f"resets are {tuple(resets.shape)}, but {name} hold {tuple(shape)} tokens")
        return inputs, name, model_kwargs

    def _prefill(self, *args, **kwargs):
        """The outputs without mems, which no step reads, because on Apple's GPUs `generate` takes them for a cache."""
        outputs = super()._prefill(*args, **kwargs)
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "mems"})

    @staticmethod
    def _reorder_cache(past_key_values, beam_idx: Tensor):
        """The cache in the order of the chosen beams. `mems` are those of the prompt and stay unchanged."""
        if isinstance(past_key_values, Cache):
            past_key_values.reorder_cache(beam_idx)
        return past_key_values

    def _get_stopping_criteria(self, generation_config, stopping_criteria, tokenizer=None):
        strings = generation_config.stop_strings
        if strings is None or getattr(tokenizer, "mode", None) is None:
            return super()._get_stopping_criteria(generation_config, stopping_criteria, tokenizer)
        others = copy.copy(generation_config)
        others.stop_strings = None
        criteria = super()._get_stopping_criteria(others, stopping_criteria, tokenizer)
        criteria.append(_StopStrings(tokenizer, strings))
        return criteria

    def _expand_inputs_for_generation(self, expand_size=1, **kwargs):
        if kwargs.get("mems") is not None:
            kwargs["mems"] = tuple(states.repeat_interleave(expand_size, dim=0) for states in kwargs["mems"])
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)


class _StopStrings(StopStringCriteria):
    """Stop strings of a `TransfoXLTokenizer`: tokens are decoded after a token that is decoded unchanged, instead of
    transformers' prefix "abcdef", which a vocabulary of words encodes as `<unk>`."""

    @staticmethod
    def clean_tokenizer_vocab(tokenizer, *args, **kwargs):
        # Tokens of letters and digits first, because decoding may change a punctuation mark beside other tokens.
        for will_do in (str.isalnum, str.strip):
            for token, index in tokenizer.get_vocab().items():
                text = tokenizer.convert_tokens_to_string([token])
                if will_do(text) and tokenizer(text, add_special_tokens=False)["input_ids"] == [index]:
                    return StopStringCriteria.clean_tokenizer_vocab(tokenizer, text, **kwargs)
        raise ValueError(
            "stop_strings need a vocabulary with a token that is read back as it is, and this one has none"
        )
