"""A pair in this process as the other side of a conversation in the terminal."""

from collections.abc import Iterator

from specbeam.doors.chats import BUNDLED_TEMPLATE, prompt_of_messages
from specbeam.doors.cli.common import method_for
from specbeam.doors.cli.talking import ChatOptions, Cost, Message
from specbeam.doors.options.settings import Settings
from specbeam.doors.request import Request
from specbeam.errors import NotSupported
from specbeam.generation import pieces_of
from specbeam.models.pair import Pair
from specbeam.recipes.method import Method

CHUNK = 64  # tokens per block of the prefix cache
KEPT_BYTES = 256 * 2**20  # memory of the prefix caches of all models


class PairSpeaker:
    """A pair in this process, with a prefix cache for the whole conversation."""

    def __init__(self, pair: Pair, name: str, template: str | None) -> None:
        own = getattr(pair.tokenizer, "chat_template", None)
        chosen = template or own
        if chosen is None and name == "bundled":
            chosen = BUNDLED_TEMPLATE
        if chosen is None:
            raise NotSupported(f"{name} has no chat template; give --chat-template, or use `specbeam generate`")
        self.pair = pair
        self.name = name
        self.template = chosen if chosen != own else None
        self.holds_conversation = chosen != BUNDLED_TEMPLATE
        models = [lm for lm in (pair.target, pair.draft) if lm is not None and hasattr(lm, "remember_prompts")]
        for lm in models:
            lm.remember_prompts(CHUNK, KEPT_BYTES // len(models))

    def check(self, options: ChatOptions) -> str:
        method = self._method(options)
        method.parts(self.pair.target, self.pair.draft)
        return f"{method.name}, {method.law}"

    def _method(self, options: ChatOptions) -> Method:
        return method_for(self.pair, options.method or None, options.method_settings)

    def answer(self, messages: list[Message], options: ChatOptions, cost: Cost) -> Iterator[str]:
        ids = prompt_of_messages(self.pair.tokenizer, self.template, messages)
        settings = Settings.given(dict(options.settings), None)
        request = Request.of(self.pair, ids, self._method(options), settings, options.seed)
        for error in request.refused.values():
            raise error
        (session,) = request.sessions
        yield from pieces_of(request)
        best = request.answers(session)[0]
        cost.tokens = len(best.tokens)
        cost.passes = session.count.target_passes
        cost.prompt_tokens = len(ids)
        cost.known_tokens = session.recalled.get(self.pair.target, 0)
