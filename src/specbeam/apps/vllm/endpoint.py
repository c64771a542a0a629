"""The entry point `vllm.endpoint_plugins`: requests with `use_beam_search` or a field `specbeam` run specbeam's loop.

The answers have vLLM's own form. Other requests, and inputs that specbeam does not decode, stay vLLM's.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from specbeam import Beam, Method, beam_search, load, methods, speculative_beam_search
from specbeam.apps.serve.engine import Engine
from specbeam.errors import BadSetting, SpecbeamError, one_of

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

AT_ONCE = 256  # requests that wait for their texts in threads
_ASKED: ContextVar[dict[str, Any] | None] = ContextVar("specbeam", default=None)  # the field of the current request


class BeamEndpoint:
    """The plug-in: replaces the beam search of the handlers of completions and chats.

    The draft model is the path or hub id in SPECBEAM_DRAFT; without it, beams are decoded without drafts.
    """

    name = "specbeam"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add no route: the routes of completions and chats stay vLLM's."""

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Load the draft model, and take over the beam search of the server's handlers.

        Args:
            engine_client: the server's `AsyncLLM`; None on a server without an engine.
        """
        if engine_client is None:
            return
        pair = load(engine_client, draft=os.environ.get("SPECBEAM_DRAFT") or None)
        beams = ServerBeams(Engine(pair).start())
        state.specbeam = beams
        for handler, create in (
            (getattr(state, "openai_serving_completion", None), "create_completion"),
            (getattr(state, "openai_serving_chat", None), "create_chat_completion"),
        ):
            if handler is not None:
                beams.take_over(handler, create)


class ServerBeams:
    """Beams for the requests of a vLLM server, decoded together by one engine.

    Args:
        engine: decodes with a pair whose target is the server's own engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="specbeam request")

    def take_over(self, handler: Any, create: str) -> None:
        """Replace the beam search of a handler, and let its requests have a field `specbeam`.

        Args:
            create: name of the handler's method that answers a request.
        """
        own_search = handler.beam_search
        own_create = getattr(handler, create)

        async def answer(request: Any, *given: Any, **named: Any) -> Any:
            asked = (request.model_extra or {}).get("specbeam")
            if asked is None and not request.use_beam_search:
                return await own_create(request, *given, **named)
            try:
                check_request(request, asked)
            except SpecbeamError as error:
                return handler.create_error_response(str(error))
            request.use_beam_search = True
            token = _ASKED.set(asked or {})
            try:
                return await own_create(request, *given, **named)
            except SpecbeamError as error:
                return handler.create_error_response(str(error))
            finally:
                _ASKED.reset(token)

        setattr(handler, create, answer)
        handler.beam_search = partial(self.search, handler, own_search)

    async def search(
        self,
        handler: Any,
        own_search: Any,
        prompt: Any,
        request_id: str,
        params: Any,
        lora_request: Any = None,
        **more: Any,
    ) -> "AsyncGenerator[RequestOutput, None]":
        """Yield the answer to one prompt, as vLLM's own beam search does; see vLLM's `beam_search` for the arguments."""
        tokens = prompt.get("prompt_token_ids") if prompt["type"] in ("token", "tokens") else None
        if tokens is None or lora_request is not None or params.structured_outputs is not None:
            async for output in own_search(prompt, request_id, params, lora_request, **more):
                yield output
            return
        asked = dict(_ASKED.get() or {})
        method = method_of(asked, params.beam_width, self.engine.pair.draft is not None)
        options = {"max_new_tokens": params.max_tokens, "num_return_sequences": min(params.beam_width, method.beams)}
        if method.search:
            options["length_penalty"] = params.length_penalty
        if params.ignore_eos:
            options["eos_token_id"] = []
        decode = partial(self.engine.generate, [list(tokens)], method, **(options | asked))
        found = await asyncio.get_running_loop().run_in_executor(self.pool, decode)
        beams = found[0].beams[: params.beam_width]
        yield _answer(handler, prompt, request_id, params, beams)


def check_request(request: Any, asked: Any) -> None:
    """Raise `BadSetting` for requests that specbeam would answer in part only."""
    if asked is not None and not isinstance(asked, dict):
        raise BadSetting(f'specbeam is {asked!r}; it is an object, such as {{"method": "dsbd", "seed": 1}}')
    if request.stream:
        raise BadSetting("beams cannot be streamed by vLLM's API; leave stream out, or use `specbeam serve`")
    if getattr(request, "logprobs", None):
        raise BadSetting("specbeam returns the score of each beam and no logprobs of its tokens; leave logprobs out")


def method_of(asked: dict[str, Any], beams: int, has_draft: bool) -> Method:
    """Return the method of a request; its name and settings are removed from `asked`.

    Args:
        asked: the field `specbeam`: `method`, `settings` of the recipe, and options of `generate`.
        beams: `n` of the request.
        has_draft: whether the pair has a draft model.
    """
    name = asked.pop("method", None)
    settings = asked.pop("settings", {})
    if name is None:
        return speculative_beam_search(beams, **settings) if has_draft else beam_search(beams, **settings)
    recipes = {recipe.name: recipe.make for recipe in methods()}
    one_of("method", name, recipes)
    if "beams" in next(one.defaults for one in methods() if one.name == name):
        settings = {"beams": beams} | settings
    return recipes[name](**settings)


def _answer(handler: Any, prompt: Any, request_id: str, params: Any, beams: list[Beam]) -> "RequestOutput":
    """Return beams in vLLM's form. The text of a beam does not show its end token."""
    from vllm.outputs import CompletionOutput, RequestOutput

    tokenizer = handler.renderer.get_tokenizer()
    outputs = []
    for number, beam in enumerate(beams):
        ended = beam.finished and not params.ignore_eos
        shown = beam.tokens[:-1] if ended else beam.tokens
        outputs.append(
            CompletionOutput(
                index=number,
                text=tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens),
                token_ids=beam.tokens if params.include_stop_str_in_output else shown,
                cumulative_logprob=beam.score * len(beam.tokens) ** params.length_penalty,
                logprobs=None,
                finish_reason="stop" if beam.finished else "length",
                stop_reason=beam.tokens[-1] if ended else None,
            )
        )
    tokens = prompt["prompt_token_ids"]
    return RequestOutput(request_id, prompt.get("prompt"), tokens, None, outputs, finished=True)
