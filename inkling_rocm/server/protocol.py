"""Request bodies: OpenAI's fields, plus SGLang's extensions where clients send them.

Unknown fields are ignored and null means "not given", as OpenAI has it; those that would change
what comes out are refused (`UNSUPPORTED`). Ranges are checked here where they do not depend on the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool
from pydantic_core import PydanticCustomError

MAX_N = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20

_INT64 = 2**63

T = TypeVar("T")
# The first wrong entry ends a list's validation. Without this every entry of a long list becomes an
# error object, once for each alternative of a union: minutes and gigabytes for a body of 3 MB.
Many = Annotated[list[T], Field(fail_fast=True)]

Token = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**31)]


def _biases(limit: float) -> AfterValidator:
    """Refuses the first value of a logit_bias that is no number within +-limit (dictionaries cannot
    fail fast)."""

    def check(biases: dict[str, Any]) -> dict[str, Any]:
        for token, bias in biases.items():
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not (number and -limit <= bias <= limit):
                message = f"token {token[:40]!r} wants a number from {-limit} to {limit}"
                raise PydanticCustomError("logit_bias", "{message}", {"message": message})
        return biases

    return AfterValidator(check)


class Body(BaseModel):
    """Base of all bodies.

    Attributes:
        UNSUPPORTED: fields of other servers whose request would be another one without them, and
            what to send instead.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


_ONE_MODEL = "this server has one model and no adapters"
_NO_EMBEDDINGS = "send text or token ids"
_IN_CHAT = "use response_format or regex of /v1/chat/completions"
_NO_EDITS = "use logit_bias"
_OTHER_SAMPLING = {
    "use_beam_search": "leave it out",
    "bad_words": _NO_EDITS,
    "allowed_token_ids": _NO_EDITS,
    "custom_logit_processor": _NO_EDITS,
    "include_stop_str_in_output": "use stop_token_ids, whose tokens are in the answer",
    "return_hidden_states": "leave it out",
}
_GUIDED = dict.fromkeys(
    (
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "ebnf",
    ),
    _IN_CHAT,
)


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingBody(Body):
    """What both completion endpoints share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Any], _biases(100)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[Token] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    user: str | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    UNSUPPORTED = {
        **_OTHER_SAMPLING,
        "lora_path": _ONE_MODEL,
        "prompt_embeds": _NO_EMBEDDINGS,
        **_GUIDED,
        **dict.fromkeys(("json_schema", "regex", "response_format"), _IN_CHAT),
    }

    prompt: str | Many[str] | Many[Token] | Many[Many[Token]]
    max_tokens: Count | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: str | None = None


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class ContentPart(Body):
    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: FunctionSpec


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    UNSUPPORTED = {
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "answers are text",
        "image_data": "send text",
        "lora_path": _ONE_MODEL,
        **dict.fromkeys(("json_schema", "structural_tag"), "use response_format"),
        **_OTHER_SAMPLING,
        **_GUIDED,
    }

    messages: Annotated[Many[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[Count, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | Finite | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    regex: str | None = None


class TokenizeBody(Body):
    """POST /tokenize: text as it is, or messages as the chat endpoint renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    tools: Many[Tool] | None = None
    reasoning_effort: str | Finite | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Many[Token]


class NativeSampling(Body):
    """SGLang's sampling_params."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Any], _biases(10000)] | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[Token] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    sampling_seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class GenerateBody(Body):
    """POST /generate, SGLang's own form."""

    UNSUPPORTED = {
        **dict.fromkeys(("image_data", "video_data", "audio_data"), "send text"),
        "input_embeds": _NO_EMBEDDINGS,
        "lora_path": _ONE_MODEL,
        "custom_logit_processor": "use logit_bias of sampling_params",
        "return_hidden_states": "leave it out",
        "session_params": "send the whole prompt; what it begins with is in the prefix cache",
        "token_ids_logprob": "use top_logprobs_num",
    }

    text: str | Many[str] | None = None
    input_ids: Many[Token] | Many[Many[Token]] | None = None
    sampling_params: NativeSampling | Many[NativeSampling] | None = None
    rid: str | Many[str] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None


class Model(Body):
    """One entry of /v1/models."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "inkling-rocm"
    max_model_len: int


class ErrorDetail(Body):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Body):
    """Every error answer."""

    error: ErrorDetail
