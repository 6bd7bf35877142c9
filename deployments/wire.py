"""The HTTP documents as pydantic models: what the OpenAPI page shows, and how a request's fields are checked.

Items are only described here: `items.py` reads them, since a union of models names no path in its errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, StringConstraints


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{4})"
_DATA_URI = f"data:[a-z]*/?[a-z0-9.+-]*;base64,{_BASE64}"


def _no_number(value: object) -> object:
    """Python takes 1 for True: a document's numbers are not."""
    if isinstance(value, bool | None):
        return value
    raise ValueError("expected true or false")


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Yes = Annotated[Literal[True], BeforeValidator(_no_number)]
No = Annotated[Literal[False], BeforeValidator(_no_number)]
Text = Annotated[str, StringConstraints(min_length=1)]
Image = Annotated[
    str,
    Field(
        pattern=f"^(?:{_DATA_URI}|{_BASE64}|https?://.+)$",
        description="a data URI, bare base64, or an http(s) URL where allowed; in msgpack also raw bytes",
    ),
]
ImageLink = Annotated[
    str,
    Field(
        pattern=f"^(?:{_DATA_URI}|https?://.+)$", description="a data URI, or an http(s) URL where allowed"
    ),
]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class TextPart(_Wire):
    """A text among the parts of a `content`."""

    type: Literal["text"]
    text: str


class ImageUrl(_Wire):
    """Where a picture is."""

    url: ImageLink
    detail: Literal["auto"] | None = None


class ImagePart(_Wire):
    """A picture among the parts of a `content`."""

    type: Literal["image_url"]
    image_url: ImageUrl | ImageLink


Content = Annotated[list[TextPart | ImagePart], Field(min_length=1)]


class TextItem(_Wire):
    """Text, and before it pictures if any."""

    text: Text
    image: Image | list[Image] | None = None
    instruction: str | None = Field(None, description="wins over the request's instruction")


class ImageItem(_Wire):
    """Pictures, and after them text if any."""

    image: Image | Annotated[list[Image], Field(min_length=1)]
    text: str | None = None
    instruction: str | None = Field(None, description="wins over the request's instruction")


class ContentItem(_Wire):
    """Texts and pictures in the order given."""

    content: Content
    instruction: str | None = Field(None, description="wins over the request's instruction")


class Message(_Wire):
    """A message of the system (the instruction), the user (the item) or the assistant (empty, last)."""

    role: Literal["system", "user", "assistant"]
    content: Text | Content


InputEntry = Text | TextItem | ImageItem | ContentItem | TokenIds
Input = InputEntry | Annotated[list[InputEntry], Field(min_length=1)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=3)]


Pixels = Annotated[int, Field(ge=1, le=2**31 - 1)]


class PixelSize(_Wire):
    """Bounds of a resized picture's pixels, as transformers' processors name them."""

    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class ProcessorKwargs(_Wire):
    """Bounds of a resized picture's pixels, in either form; the checkpoint's own where not given."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    size: PixelSize | None = None


def _given(name: str) -> dict[str, Any]:
    """JSON schema of objects in which a field is there and not null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class EmbeddingRequestBody(_Wire):
    """Body of `POST /v1/embeddings`: `input` or `messages`, and how to embed it.

    Fields that other services' clients send are honoured or refused by name. Those from `normalize` on take
    only the values that change nothing.
    """

    model_config = ConfigDict(json_schema_extra={"oneOf": [_given("input"), _given("messages")]})

    input: SkipValidation[Input] | None = Field(
        None,
        description="a string, an item, token ids, or a list of these",
    )
    messages: SkipValidation[Messages] | None = Field(
        None,
        description="instead of `input`: one conversation, which is one item",
    )
    model: str | None = Field(None, description="must be the served model's name when given")
    dimensions: int | None = Field(None, ge=1, description="leading values to keep before normalising")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian float32; default: float"
    )
    instruction: str | None = Field(None, description="default instruction of items that bring none")
    truncate: Literal["none", "end"] | None = Field(
        None, description="end: shorten the user's text of an item that is too long; default: none, a 400"
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="keeps cached pictures apart from other salts"
    )
    user: str | None = Field(None, description="taken and not used")
    mm_processor_kwargs: ProcessorKwargs | None = Field(
        None, description="how pictures are resized: not beyond the checkpoint's own most"
    )

    continue_final_message: bool | None = None
    add_generation_prompt: Yes | None = None
    add_special_tokens: Yes | None = None
    normalize: Yes | None = None
    normalized: Yes | None = None
    use_activation: Yes | None = None
    embedding_types: tuple[Literal["float"]] | None = Field(None, strict=False)
    embedding_type: Literal["float"] | None = None
    output_dtype: Literal["float"] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["little"] | None = None
    priority: Annotated[Literal[0], BeforeValidator(_no_bool)] | None = None
    late_chunking: No | None = None
    return_multivector: No | None = None
    padding: Literal["do_not_pad"] | None = None
    truncate_prompt_tokens: None = None
    truncation_side: None = None
    media_io_kwargs: None = None
    chat_template: None = None
    chat_template_kwargs: None = None
    task: None = None
    input_type: None = None
    prompt_name: None = None
    output_dimension: None = None


_TEMPLATE = "the prompt is always the model's own template"
_NORMALISED = "vectors are always L2-normalised: leave it out or send true"
_FLOATS = "vectors are float32: leave it out"
WHY_REFUSED = {
    "continue_final_message": "goes with a last, empty message of the assistant, and only with it",
    "add_generation_prompt": f"{_TEMPLATE}, which ends with the assistant's turn: leave it out or send true",
    "add_special_tokens": f"{_TEMPLATE}, with the tokenizer's own additions: leave it out or send true",
    "normalize": _NORMALISED,
    "normalized": _NORMALISED,
    "use_activation": _NORMALISED,
    "embedding_types": 'vectors are float32: leave it out or send ["float"]',
    "embedding_type": f"{_FLOATS}, and use `encoding_format` for base64",
    "output_dtype": _FLOATS,
    "embed_dtype": _FLOATS,
    "endianness": "base64 and msgpack are little-endian: leave it out",
    "priority": "requests have no priorities: leave it out or send 0",
    "late_chunking": "every item is embedded by itself: leave it out or send false",
    "return_multivector": "every item has one vector: leave it out or send false",
    "padding": "sequences are packed without padding: leave it out",
    "truncate_prompt_tokens": 'it would cut the template: use `"truncate": "end"`',
    "truncation_side": 'it would cut the template: use `"truncate": "end"`',
    "mm_processor_kwargs": "of it only min_pixels, max_pixels and size are honoured",
    "media_io_kwargs": "pictures are read by the model's own rules",
    "chat_template": _TEMPLATE,
    "chat_template_kwargs": _TEMPLATE,
    "task": "the model has no task adapters: say it in `instruction`",
    "input_type": "the model tells queries from documents by `instruction`",
    "prompt_name": "the model has no named prompts: use `instruction`",
    "output_dimension": "use `dimensions`",
}
"""Why the other services' fields of EmbeddingRequestBody take no other value."""


class Embedding(BaseModel):
    """One item's vector: numbers, base64 of little-endian float32, or in msgpack those bytes themselves."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens of all items, text and pictures alike, as the model saw them."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Vectors of a request's items, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "epd"


class ModelList(BaseModel):
    """The served models: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """`param`: path of the offending value. `code`: one of those in docs/api.md."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """What every error answers with."""

    error: ErrorDetail
