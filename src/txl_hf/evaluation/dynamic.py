"""Dynamic evaluation (Krause et al., 2018, https://arxiv.org/abs/1709.07432; of Transformer-XL: 2019,
https://arxiv.org/abs/1904.08378): gradient steps on the text being read, undone at the end."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm.auto import tqdm

from ..transfo_xl.modeling_transfo_xl import TransfoXLForCausalLM
from .reading import Reader, Reading, Segment, Text, device_of, evaluating


class Diverged(ValueError):
    """The losses are not finite any more, because the steps on the text were too large."""


@dataclass(frozen=True, eq=False)
class DynamicEvaluation:
    """Weights θ that follow a text: each segment is scored, and then θ takes a gradient step on it.

    With g the gradient of the segment's mean loss, over all streams and processes, and θ₀ the weights as they began:

        θ ← θ - η g + λ (θ₀ - θ),    or with statistics    θ ← θ - η g / (√S + ε) + min(λ √S, 1) (θ₀ - θ),

    where S = Σ g² over the segments of a training text, element by element. No token influences its own loss or an
    earlier one. Tokens of a warm-up have steps too. Dropout is off. The memory keeps the states that earlier weights
    computed, as in the original. A model must not be evaluated dynamically in two threads at once.

    Settings of the authors for the published models, with segments of 128 tokens, one stream, and as statistics 1/5000
    of the training text: WikiText-103 η = 2e-6, λ = 0, ε = 1e-5; enwik8 η = 1.2e-5, λ = 24, ε = 1e-4; text8
    η = 1.5e-5, λ = 24, ε = 1e-4. S grows with the length of its text, so η has to be chosen for that length.
    Without statistics η is much larger.

    Args:
        learning_rate: η ≥ 0; with 0 the losses are those of a static evaluation, in half precision up to its rounding.
        decay: λ ≥ 0, how strongly the weights return to θ₀; at most 1 without statistics, which restores them.
        epsilon: ε > 0; unused without statistics. Elements with an S near 0 move by plain gradient descent at the rate
            η / ε, which must stay near a rate that works without statistics: 0.1 was the best on Penn Treebank, 1
            worse than no steps, and η = 1e-3 with the default ε is 100, and diverges. The settings above have 0.12 to
            0.2.
        statistics: token ids of a training text, some hundred segments, read with the lengths and streams of the text;
            or a `GradientStatistics`, computed once for several readings. None: plain gradient descent.
        parameters: a regular expression found in the names of the parameters that follow, among those that require a
            gradient: r"layers\\.(9|1[0-1])\\." for the last quarter of twelve layers, "lora" for an adapter. A tied
            one goes by each of its names. None: all that require a gradient.

    Raises:
        ValueError: a number is out of range or no number, `parameters` is no regular expression, or `statistics` no
            text. An evaluation raises one too if the weights diverge (`Diverged`), in float16, and for a model from
            `quantize_dynamic`.
    """

    learning_rate: float
    decay: float = 0.0
    epsilon: float = 1e-5
    statistics: Any = None
    parameters: str | None = None

    def __post_init__(self):
        for name in ("learning_rate", "decay", "epsilon"):
            value, least = getattr(self, name), "above" if name == "epsilon" else "at least"
            number = isinstance(value, Real) and math.isfinite(value)
            if not number or value < 0 or (name == "epsilon" and value == 0):
                raise ValueError(f"{name}={value!r} must be a finite number {least} 0")
        if self.decay > 1 and self.statistics is None:
            raise ValueError(
                f"decay={self.decay} must be at most 1 without statistics: 1 draws the weights back all the way"
            )
        is_text = hasattr(self.statistics, "__len__") and not isinstance(self.statistics, Mapping)
        if self.statistics is not None and not is_text:
            raise ValueError(
                f"statistics are of type {type(self.statistics).__name__}: give the token ids of a training text, or "
                "what GradientStatistics.of took from them"
            )
        if not isinstance(self.parameters, str | None):
            raise ValueError(f"parameters={self.parameters!r} must be a regular expression, which is a string")
        try:
            re.compile(self.parameters or "")
        except re.error as error:
            raise ValueError(f"parameters={self.parameters!r} is no regular expression: {error}") from None

    def describe(self) -> dict[str, float | int | str | None]:
        """The settings that a figure depends on, for JSON; for statistics, their number of tokens."""
        tokens = None if self.statistics is None else len(self.statistics)
        described = {name: getattr(self, name) for name in ("learning_rate", "decay", "epsilon", "parameters")}
        return {**described, "statistics": tokens}

    @contextmanager
    def adapted_to(
        self,
        model: TransfoXLForCausalLM,
        token_ids,
        segment_length: int,
        memory_length: int | None = None,
        *,
        progress: bool = False,
    ) -> Iterator[TransfoXLForCausalLM]:
        """The model with the weights that it has after reading a text, such as the prompt of `generate`:

            with DynamicEvaluation(1e-3).adapted_to(model, prompt[0], segment_length=64):
                model.generate(prompt)

        Its weights are restored at the end, bit for bit, also after an error. Until then adaptations of one model may
        be nested, but must not overlap otherwise, in threads or asyncio tasks.

        Args:
            model, token_ids, segment_length, memory_length, progress: see `evaluate_language_model`.

        Raises:
            ValueError: see `evaluate_language_model`.
            Diverged: a loss, or a logit after the text, is not finite.
        """
        if isinstance(token_ids, Tensor):
            # A prompt of `generate` is on the model's device.
            token_ids = token_ids.cpu()
        text = Text(model, token_ids, Reading(segment_length, memory_length, progress=progress))
        with adapting(model, self, text) as adaptation:
            bar = tqdm(total=text.tokens, unit="token", desc="adapt", disable=not progress)
            with following(model), bar:
                for segment, _, _ in adaptation.losses(text):
                    bar.update(segment.scored)
            adaptation.check_last_step(segment.labels[:, -1:])
            yield model


@dataclass(frozen=True, eq=False)
class GradientStatistics:
    """The statistics of a `DynamicEvaluation`, computed once for many readings, with other rates or prompts.

    They are valid for the weights that they were computed with; only names and shapes are checked. A text that is read
    with other lengths or streams, or with documents where the training text had none, is refused, because its
    gradients are of another size. They take as much memory as the weights, in fp32 those of half precision.

    Args:
        roots: √S of each parameter, by its name and in its shape.
        tokens: the number of tokens of the training text.
        protocol: the lengths and streams that it was read with, and whether as documents.
    """

    roots: dict[str, Tensor] = field(repr=False)
    tokens: int
    protocol: dict[str, int | bool | None]

    @classmethod
    def of(
        cls,
        model: TransfoXLForCausalLM,
        token_ids,
        segment_length: int,
        memory_length: int | None = None,
        batch_size: int = 1,
        *,
        parameters: str | None = None,
        **settings: Any,
    ) -> "GradientStatistics":
        """Statistics of a training text, read with the lengths and streams of the later readings.

        Args:
            model, token_ids, …, settings: as in `evaluate_language_model`, whose errors are raised.
            parameters: as in `DynamicEvaluation`. None: statistics of all, which serve any.
        """
        text = Text(model, token_ids, Reading(segment_length, memory_length, batch_size, **settings))
        with following(model):
            adaptation = Adaptation(model, DynamicEvaluation(0.0, parameters=parameters), text.reading)
            return cls(adaptation.collect(text), len(token_ids), _protocol(text))

    def __len__(self) -> int:
        """The number of tokens of the training text."""
        return self.tokens

    def check(self, protocol: dict[str, int | bool | None]):
        """Raise a ValueError if the settings of a reading differ from those of the training text."""
        if differ := [name for name, value in protocol.items() if self.protocol.get(name) != value]:
            both = (self.protocol, protocol)
            taken, read = (", ".join(f"{name}={each.get(name)}" for name in differ) for each in both)
            raise ValueError(
                f"statistics: they were taken with {taken}, and the text is read with {read}: take them with the "
                "same, by GradientStatistics.of"
            )


class Adaptation:
    """The parameters that follow a text, and their initial values; see `adapting`."""

    def __init__(self, model: TransfoXLForCausalLM, dynamic: DynamicEvaluation, reading: Reading):
        self._model, self._dynamic, self._accelerator = model, dynamic, reading.accelerator
        _check_gradients(model, reading.accelerator)
        chosen = parameters_of(model, dynamic.parameters)
        self._names, self._parameters = list(chosen), list(chosen.values())
        self._start = [parameter.detach().clone() for parameter in self._parameters]
        # In half precision, steps much smaller than a weight would be lost, so such weights have fp32 copies.
        self._weights = [
            parameter.detach() if parameter.dtype.itemsize >= 4 else parameter.detach().float()
            for parameter in self._parameters
        ]
        self._roots: list[Tensor] | None = None

    def losses(self, text: Text) -> Iterator[tuple[Segment, Tensor, Tensor]]:
        """As `Reader.losses`. The parameters have stepped on a segment before it is yielded. All processes raise
        `Diverged` if a loss is not finite in one."""
        for segment, hidden_states, losses in self._read(text):
            is_first = segment.begin == 0
            self._check_finite(losses, f"no finite loss in the segment at token {segment.begin} of the text", is_first)
            self._step(self._gradients(losses, segment))
            unscored = segment.targets.to(losses.device) == -100
            yield segment, hidden_states.detach(), losses.detach().masked_fill(unscored, 0)

    def check_last_step(self, token: Tensor):
        """Raise `Diverged` if the logits behind any token, (1, 1), are not finite after the last step, which no later
        loss shows."""
        with evaluating(self._model), torch.no_grad():
            logits = self._model(token.to(device_of(self._model)), use_cache=False).logits
        self._check_finite(logits, "no finite logits after the last segment of the text")

    def _check_finite(self, values: Tensor, problem: str, as_they_began: bool = False):
        # All processes raise before the gradients are reduced, because the others would wait for this one.
        lost = (~values.isfinite()).sum()
        if (lost if self._accelerator is None else self._accelerator.reduce(lost, "sum")) == 0:
            return
        rate = self._dynamic.learning_rate
        if as_they_began or rate == 0:
            raise ValueError(f"{problem}, with the weights as they began: the model itself computes none")
        instead = "a smaller one" if self._roots is None else "a smaller one or a larger epsilon"
        raise Diverged(f"{problem}: with learning_rate={rate:g} the weights have diverged, so give {instead}")

    def collect(self, text: Text) -> dict[str, Tensor]:
        """√S of each parameter by its name, from a text. Raises a ValueError for a loss that is not finite."""
        squares = [torch.zeros_like(weight) for weight in self._weights]
        with tqdm(total=text.share_tokens, unit="token", desc="statistics", disable=not text.reading.progress) as bar:
            for segment, _, losses in self._read(text):
                problem = f"statistics: no finite loss in the segment at token {segment.begin} of the training text"
                self._check_finite(losses, problem, as_they_began=True)
                for square, gradient in zip(squares, self._gradients(losses, segment), strict=True):
                    square.addcmul_(gradient, gradient)
                bar.update(segment.scored)
        return dict(zip(self._names, (square.sqrt_() for square in squares), strict=True))

    def take(self, roots: dict[str, Tensor]):
        """Use these statistics from now on. Raises a ValueError if they lack a parameter or its shape."""
        self._roots = []
        for name, weight in zip(self._names, self._weights, strict=True):
            root = roots.get(name)
            if root is None or root.shape != weight.shape:
                instead = "is not in them" if root is None else f"is of shape {tuple(root.shape)} there"
                raise ValueError(
                    f"statistics: {name}, of shape {tuple(weight.shape)} in the model, {instead}: take them from this "
                    f"model, with GradientStatistics.of(model, …, parameters={self._dynamic.parameters!r})"
                )
            self._roots.append(root.to(weight))

    @torch.no_grad()
    def restore(self):
        """Restore the initial values of all parameters."""
        for parameter, start in zip(self._parameters, self._start, strict=True):
            parameter.copy_(start)
        torch.clear_autocast_cache()

    def _read(self, text: Text) -> Iterator[tuple[Segment, Tensor, Tensor]]:
        """As `Reader.losses`, with the losses of all labels, also in a warm-up."""
        # The memory is hidden states, because projected keys and values would be of earlier weights.
        reader = Reader(self._model, text.reading, projected=False)
        for segment in text.segments(device_of(self._model)):
            [hidden_states], losses = reader.read_and_score([segment], segment.labels)
            yield segment, hidden_states, losses

    def _gradients(self, losses: Tensor, segment: Segment) -> list[Tensor]:
        """Gradients of the mean loss over the segment's labels, in all streams and processes."""
        found: Sequence[Tensor | None] = [None] * len(self._parameters)
        if losses.requires_grad:
            found = torch.autograd.grad(losses.sum() / segment.labels_of_all, self._parameters, allow_unused=True)
        if all(gradient is None for gradient in found) and bool((segment.labels != -100).any()):
            raise ValueError(
                f"the losses depend on none of the {len(found)} parameters that are to follow the text (parameters="
                f"{self._dynamic.parameters!r}): those of an adapter that is merged or switched off take no part"
            )
        gradients = [
            torch.zeros_like(weight) if gradient is None else gradient.to(weight.dtype)
            for gradient, weight in zip(found, self._weights, strict=True)
        ]
        if self._accelerator is None:
            return gradients
        return [self._accelerator.reduce(gradient, "sum") for gradient in gradients]

    @torch.no_grad()
    def _step(self, gradients: list[Tensor]):
        rate, decay = self._dynamic.learning_rate, self._dynamic.decay
        for i, (weight, gradient) in enumerate(zip(self._weights, gradients, strict=True)):
            root = None if self._roots is None else self._roots[i]
            if decay > 0:
                start = self._start[i].to(weight.dtype)
                weight.lerp_(start, min(decay, 1.0) if root is None else (decay * root).clamp_(max=1))
            if root is not None:
                gradient = gradient / (root + self._dynamic.epsilon)
            weight.add_(gradient, alpha=-rate)
            if weight.dtype != self._parameters[i].dtype:
                self._parameters[i].copy_(weight)
        # Autocast of the caller caches casts of the weights before the step.
        torch.clear_autocast_cache()


def _check_gradients(model: TransfoXLForCausalLM, accelerator: Any) -> None:
    """Raise a ValueError for a model whose gradients PyTorch would compute wrong or incomplete without an error: in
    float16, with layers of `quantize_dynamic`, or sharded."""
    halves = any(parameter.dtype == torch.float16 for parameter in model.parameters())
    if halves or (accelerator is not None and accelerator.mixed_precision == "fp16"):
        raise ValueError("dynamic evaluation loses small gradients in float16: take bfloat16 or float32")
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            raise ValueError(
                f"{name} is quantised by torch's quantize_dynamic, whose layers pass no gradient on: dynamic "
                "evaluation needs the model as it was before"
            )
        if isinstance(module, FSDPModule):
            raise ValueError(
                "dynamic evaluation changes whole weights, which FSDP keeps in parts: evaluate the model that was "
                "saved, with one copy in each process"
            )


@contextmanager
def adapting(model: TransfoXLForCausalLM, dynamic: DynamicEvaluation, text: Text) -> Iterator[Adaptation]:
    """An `Adaptation` to a text, with statistics that are taken with its lengths and streams; the weights are restored
    at the end, also after an error."""
    with following(model):
        adaptation = Adaptation(model, dynamic, text.reading)
    try:
        if isinstance(dynamic.statistics, GradientStatistics):
            dynamic.statistics.check(_protocol(text))
            adaptation.take(dynamic.statistics.roots)
        elif dynamic.statistics is not None:
            statistics = _open_statistics(dynamic.statistics, model, text)
            with following(model):
                adaptation.take(adaptation.collect(statistics))
        yield adaptation
    finally:
        adaptation.restore()


def _open_statistics(token_ids: Any, model: TransfoXLForCausalLM, text: Text) -> Text:
    """The training text of statistics, with the lengths and streams of the text to evaluate."""
    # Places are of one text; a token ends the documents of both texts.
    document_end = text.document_end if isinstance(text.document_end, int) else None
    try:
        return Text(model, token_ids, replace(text.reading, warm_up=0, document_end=document_end, memory=None))
    except ValueError as error:
        raise ValueError(f"statistics: {error}") from None


def _protocol(text: Text) -> dict[str, int | bool | None]:
    """The settings that the gradients of a segment depend on, beside weights and tokens."""
    return {**text.reading.settings(), "documents": text.document_end is not None}


@contextmanager
def following(model: TransfoXLForCausalLM) -> Iterator[None]:
    """Evaluation mode with gradients, whatever mode of PyTorch the caller is in: around the loop over a generator,
    which runs in the modes of its caller."""
    with evaluating(model), torch.inference_mode(False), torch.enable_grad():
        yield


def parameters_of(model: TransfoXLForCausalLM, pattern: str | None) -> dict[str, nn.Parameter]:
    """The parameters that a pattern chooses, each once, by its first name. Raises a ValueError if there is none, or
    one is offloaded between calls."""
    named = model.named_parameters(remove_duplicate=False)
    trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
    if not trainable:
        raise ValueError("no parameter of the model requires a gradient, so that none can follow the text")
    found = {id(parameter) for name, parameter in trainable.items() if re.search(pattern or "", name)}
    chosen = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in found}
    if not chosen:
        raise ValueError(
            f"parameters={pattern!r} is found in the name of no parameter that requires a gradient; one of them is "
            f"{next(iter(trainable))}"
        )
    if any(parameter.is_meta for parameter in chosen.values()):
        raise ValueError("weights that are elsewhere between calls (offloaded) cannot follow the text")
    return chosen
