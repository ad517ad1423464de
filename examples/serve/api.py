"""The form that OpenAI's clients speak: `/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

import asyncio
import functools
import json
import logging
import queue
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import uvicorn
from starlette import applications, exceptions, requests, responses, routing

from examples.serve import logprobs
from nsa_jax.generate import Batcher, Ended, Request
from nsa_jax.generate.text import lone_surrogate
from nsa_jax.pretrained import ChatFormat

LOG = logging.getLogger(__name__)
NUMBER = (int, float)
# Fields of a request, with their kinds. Those that are None may be left out.
FIELDS: dict[str, Any] = dict(
    model=str, prompt=(str, list), messages=list, max_tokens=int, max_completion_tokens=int,
    temperature=NUMBER, top_p=NUMBER, stop=(str, list), seed=int, stream=bool, stream_options=dict,
)  # fmt: skip
# Fields that must change nothing here, with the value that does not.
NEUTRAL = dict(n=1, best_of=1, echo=False, frequency_penalty=0, presence_penalty=0)
UNUSED = ("user", "metadata", "store")
FINISHED = {Ended.END_TOKEN: "stop", Ended.STOP: "stop", Ended.ENOUGH: "length", Ended.FULL: "length"}
BAD_FIELD, OF_SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """An error that the client is told, with its HTTP status."""

    def __init__(self, message: str, status: int = 400, kind: str = BAD_FIELD, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = dict(error=dict(message=message, type=kind, param=None, code=code))


type Answer = dict[str, Any]


class Kind(NamedTuple):
    """How the two endpoints differ: what their answers are called, and where the text stands in them."""

    prefix: str
    whole: str
    piece: str
    opening: Answer
    in_whole: Callable[[str], Answer]
    in_piece: Callable[[str], Answer]
    fields: dict[str, Any]
    likeliest: Callable[[dict[str, Any]], int | None]
    logprobs: Callable[[Sequence[logprobs.Told]], Answer]


TEXT = Kind(
    *("cmpl", "text_completion", "text_completion"),
    opening=dict(text=""),
    in_whole=lambda text: dict(text=text),
    in_piece=lambda text: dict(text=text),
    fields=dict(logprobs=int),
    likeliest=lambda fields: fields.get("logprobs"),
    logprobs=logprobs.in_text,
)
CHAT = Kind(
    *("chatcmpl", "chat.completion", "chat.completion.chunk"),
    opening=dict(delta=dict(role="assistant", content="")),
    in_whole=lambda text: dict(message=dict(role="assistant", content=text)),
    in_piece=lambda text: dict(delta=dict(content=text)),
    fields=dict(logprobs=bool, top_logprobs=int),
    likeliest=lambda fields: fields.get("top_logprobs", 0) if fields.get("logprobs") else None,
    logprobs=logprobs.in_chat,
)


class Api:
    """Answers requests with the texts of a batcher.

    Args:
      batcher: has the tokenizer, and `temperature` and `top_p` in its `sampling`.
      tokenizer: the same `tokenizers.Tokenizer`, to encode prompts.
      chat: template and end tokens of the model.
      name: of the model.
      max_length: capacity of a slot of the batcher.
      logprobs: the batcher's: how many of the likeliest tokens clients may ask for; None for no
        log-probabilities.

    Attributes:
      app: the ASGI application.
    """

    def __init__(
        self, batcher: Batcher, tokenizer: Any, chat: ChatFormat, *, name: str, max_length: int,
        logprobs: int | None = None,
    ):  # fmt: skip
        self._batcher, self._tokenizer, self._chat = batcher, tokenizer, chat
        self._name, self._max_length, self._began = name, max_length, int(time.time())
        self._logprobs = logprobs
        self._going: dict[Request, asyncio.Task[None]] = {}
        self._stopping = False
        post = functools.partial(routing.Route, methods=["POST"])
        self.app = applications.Starlette(
            routes=[
                routing.Route("/v1/models", self._models),
                routing.Route("/v1/models/{name:path}", self._model),
                post("/v1/completions", functools.partial(self._answer, TEXT)),
                post("/v1/chat/completions", functools.partial(self._answer, CHAT)),
            ],
            exception_handlers={
                ApiError: lambda _, error: responses.JSONResponse(error.body, error.status),
                exceptions.HTTPException: _of_http,
                Exception: lambda _, error: responses.JSONResponse(_failed(error).body, 500),
            },
        )

    def stop(self) -> None:
        """Ends all that is being written, and takes nothing more. A server calls it before it closes."""
        self._stopping = True
        for request in list(self._going):
            request.cancel()

    async def _models(self, _: requests.Request) -> responses.Response:
        return responses.JSONResponse(dict(object="list", data=[self._of_model()]))

    async def _model(self, http: requests.Request) -> responses.Response:
        self._check_model(http.path_params["name"])
        return responses.JSONResponse(self._of_model())

    def _of_model(self) -> dict[str, Any]:
        return dict(id=self._name, object="model", created=self._began, owned_by="nsa_jax")

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise ApiError(
                f"model must be {self._name!r}, got {name!r}. Name that one.", 404, code="model_not_found"
            )

    async def _answer(self, kind: Kind, http: requests.Request) -> responses.Response:
        fields = _checked(await http.body(), FIELDS | kind.fields)
        self._check_model(fields.get("model", ""))
        count = self._likeliest(kind, fields)
        try:
            request = self._submit(kind, fields, await self._prompt(kind, fields))
        except (TypeError, ValueError) as error:
            raise ApiError(str(error).replace("max_new_tokens", "max_tokens")) from None
        except queue.Full as error:
            raise ApiError(str(error), 429, "rate_limit_error", "queue_full") from None
        self._going[request] = asyncio.create_task(self._watch(http, request))
        told = dict(id=f"{kind.prefix}-{secrets.token_hex(12)}", created=int(time.time()), model=self._name)
        if fields.get("stream"):
            with_usage = bool(fields.get("stream_options", {}).get("include_usage"))
            events = self._events(kind, request, told, count, with_usage)
            return responses.StreamingResponse(events, media_type="text/event-stream")
        try:
            pieces = [piece async for piece in request]
        except Exception as error:
            return responses.JSONResponse(_failed(error).body, 500)
        text = "".join(piece.text or "" for piece in pieces)
        found = None
        if count is not None:
            teller = logprobs.Teller(self._tokenizer, count)
            found = kind.logprobs([told for piece in pieces for told in teller.tell(piece)])
        choice = dict(index=0, logprobs=found, finish_reason=self._reason(request), **kind.in_whole(text))
        return responses.JSONResponse(told | dict(object=kind.whole, choices=[choice], usage=_usage(request)))

    def _likeliest(self, kind: Kind, fields: dict[str, Any]) -> int | None:
        """How many of the likeliest tokens stand beside each new one; None for no log-probabilities."""
        count, asked = kind.likeliest(fields), fields.get("logprobs")
        if count is None and fields.get("top_logprobs"):
            raise ApiError(f"top_logprobs must come with logprobs=true, got {asked!r}. Add it.")
        if count is not None and self._logprobs is None:
            raise ApiError(
                f"logprobs must be left out, got {asked!r}. Start the server with --logprobs to have them."
            )
        if count is not None and not 0 <= count <= self._logprobs:
            name = "top_logprobs" if kind is CHAT else "logprobs"
            raise ApiError(f"{name} must be from 0 to {self._logprobs}, got {count}. Pass one of these.")
        return count

    async def _prompt(self, kind: Kind, fields: dict[str, Any]) -> list[int]:
        """The tokens of the prompt, or of the conversation up to the answer."""
        prompt = fields.get("prompt" if kind is TEXT else "messages")
        if prompt is None:
            told = "'prompt' of /v1/completions or 'messages' of /v1/chat/completions"
            raise ApiError(f"a request must have {told}, got {', '.join(fields)}. Add it.")
        if kind is CHAT:
            prompt = self._chat.prompt([_message(each) for each in prompt])
        elif isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                got = f"a list of {len(prompt)}"
                raise ApiError(f"prompt must be one text, or the ids of one, got {got}. Split the request.")
            (prompt,) = prompt
        if isinstance(prompt, list):
            return prompt
        if found := lone_surrogate(prompt):
            raise ApiError(f"a prompt must be Unicode, got {found}. Leave it out, or correct it.")
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=kind is TEXT)
        return (await asyncio.to_thread(encode, prompt)).ids

    def _submit(self, kind: Kind, fields: dict[str, Any], ids: list[int]) -> Request:
        room = max(self._max_length - len(ids), 1) if kind is CHAT else 16
        count = fields.get("max_completion_tokens", fields.get("max_tokens", room))
        temperature, stop = fields.get("temperature", 1.0), fields.get("stop") or None
        self._check_running()
        return self._batcher.submit(
            ids, max_new_tokens=count, temperature=temperature,
            top_p=fields.get("top_p") if temperature else None, eos_id=self._chat.end_tokens or None,
            stop=[stop] if isinstance(stop, str) else stop, key=fields.get("seed", secrets.randbits(31)),
        )  # fmt: skip

    async def _watch(self, http: requests.Request, request: Request) -> None:
        """Cancels a request when its client has gone away; one that has its answer counts as gone."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        request.cancel()
        del self._going[request]

    async def _events(
        self, kind: Kind, request: Request, told: Answer, count: int | None, with_usage: bool
    ) -> AsyncIterator[str]:
        """The answer as server-sent events. An error is one of them, because the status is sent already."""

        def event(piece: Answer, reason: str | None = None, found: Answer | None = None) -> str:
            choice = dict(index=0, logprobs=found, finish_reason=reason, **piece)
            return _event(told | dict(object=kind.piece, choices=[choice]))

        try:
            yield event(kind.opening)
            teller = None if count is None else logprobs.Teller(self._tokenizer, count)
            async for piece in request:
                found = None if teller is None else kind.logprobs(teller.tell(piece))
                yield event(kind.in_piece(piece.text or ""), found=found)
            yield event(kind.in_piece(""), self._reason(request))
            if with_usage:
                yield _event(told | dict(object=kind.piece, choices=[], usage=_usage(request)))
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield _event((error if isinstance(error, ApiError) else _failed(error)).body)

    def _reason(self, request: Request) -> str:
        """Why the text ended. Raises ApiError if it is not whole."""
        if request.ended in FINISHED:
            return FINISHED[request.ended]
        self._check_running()
        raise ApiError(f"a text must end by itself, got {request.ended.name}. Try again.", 500, OF_SERVER)

    def _check_running(self) -> None:
        if self._stopping:
            raise ApiError(
                "the server must be running, got a request to stop. Try again later.",
                503,
                OF_SERVER,
                "stopping",
            )


class Server(uvicorn.Server):
    """Ends what is being written before it waits for its clients to go."""

    def __init__(self, api: Api, **options: Any):
        super().__init__(uvicorn.Config(api.app, timeout_graceful_shutdown=10, **options))
        self.api = api

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called once, on a signal or when `should_exit` is set."""
        self.api.stop()
        await super().shutdown(sockets)


def _checked(body: bytes, known: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request. Raises ApiError unless all are known and of their kinds."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:  # the latter for arrays within arrays, a thousand deep
        raise ApiError(f"a request must be JSON, got the error {str(error)!r}. Check its body.") from None
    if not isinstance(given, dict):
        raise ApiError(f"a request must be an object of JSON, got {type(given).__name__}. Add braces.")
    fields = {name: value for name, value in given.items() if value is not None and name not in UNUSED}
    for name, value in list(fields.items()):
        default = NEUTRAL.get(name)
        if name in NEUTRAL and value == default and isinstance(value, bool) == isinstance(default, bool):
            del fields[name]
        elif name in NEUTRAL:
            raise ApiError(f"{name} must be {default!r} here, got {value!r}. Leave it out.")
        elif name == "logprobs" and value is False:
            del fields[name]
        elif name not in known:
            raise ApiError(f"a field must be one of {', '.join(known)}, got {name!r}. Leave it out.")
        elif not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is not bool):
            kind = known[name] if isinstance(known[name], tuple) else (known[name],)
            names = " or ".join(each.__name__ for each in kind)
            raise ApiError(f"{name} must be of type {names}, got {value!r}. Convert it.")
    return fields


def _message(given: Any) -> dict[str, str]:
    """A message with its text in one piece."""
    parts = given.get("content") if isinstance(given, dict) else None
    if isinstance(parts, list) and all(
        isinstance(each, dict) and each.get("type") == "text" for each in parts
    ):
        parts = "".join(str(each.get("text", "")) for each in parts)
    if not isinstance(parts, str) or not isinstance(given.get("role"), str):
        raise ApiError(f"a message must have a role and a content of text, got {given!r}. Convert it.")
    return dict(role=given["role"], content=parts)


def _usage(request: Request) -> dict[str, int]:
    read, written = len(request.asked.prompt), len(request.tokens)
    return dict(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)


def _event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"


def _failed(error: Exception) -> ApiError:
    """What a client is told of an error that is none of its own. The log has all of it."""
    LOG.error("a request failed", exc_info=error)
    return ApiError(
        f"the model must be able to write, got {type(error).__name__}. Try again.", 500, OF_SERVER
    )


async def _of_http(_: requests.Request, error: Exception) -> responses.Response:
    assert isinstance(error, exceptions.HTTPException)
    told = ApiError(f"a path must be one of the API, got {error.detail!r}. Check it.", error.status_code)
    return responses.JSONResponse(told.body, error.status_code)
