"""The fields of requests to `txl-serve`, those of OpenAI's API that it supports, with the bounds of each."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, model_validator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Values of unsupported fields that change nothing, which clients send nevertheless, …
IDLE: dict[str, tuple] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("echo", "logprobs", "top_logprobs", "presence_penalty"), (0,)),
    **dict.fromkeys(("tools", "tool_calls"), ([],)),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}
# … and fields that have no influence on a reply; the last is of a generation_config.
IGNORED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
IGNORED |= {"transformers_version"}

Count = Annotated[int, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]


class Fields(BaseModel):
    """Fields by their names and types; null means that a field is not given."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_idle(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        asked = {name: value for name, value in given.items() if value is not None and name not in IGNORED}
        return {name: value for name, value in asked.items() if value not in IDLE.get(name, ())}


class ModelRequest(Fields):
    model: str | None = None


class StreamOptions(Fields):
    include_usage: bool = False


class Generation(Fields):
    """Fields of a `GenerationConfig`, as `transformers chat` sends one in JSON of its own."""

    max_new_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None


def as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class TextRequest(ModelRequest):
    """The fields of both kinds of requests for text."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    frequency_penalty: Annotated[float, Field(gt=-1, le=2)] = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=4), BeforeValidator(as_list)
    ] = []
    generation_config: Json[Generation] | None = None


class CompletionRequest(TextRequest):
    prompt: str

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """(1, L) tokens of the prompt."""
        return tokenizer(self.prompt, return_tensors="pt")["input_ids"]

    def answer(self, text: str, streamed: bool) -> dict:
        """The fields of an answer, or of a part of a stream, that differ between the kinds of requests."""
        return {"object": "text_completion", "choices": [{"index": 0, "logprobs": None, "text": text}]}


def as_text(content: Any) -> Any:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        return " ".join(texts) if all(isinstance(text, str) for text in texts) else content
    return content


class Message(Fields):
    role: str
    content: Annotated[str, BeforeValidator(as_text)] = ""
    name: str | None = None


class ChatRequest(TextRequest):
    messages: Annotated[list[Message], Field(min_length=1)]

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no chat_template: use /v1/completions")
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        settings = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return tokenizer.apply_chat_template(messages, **settings)["input_ids"]

    def answer(self, text: str, streamed: bool) -> dict:
        message = {"role": "assistant", "content": text}
        if streamed:
            return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": message}]}
        return {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}
