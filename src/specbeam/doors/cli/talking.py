"""A conversation in the terminal, with a pair (`pair_speaker.py`) or a server. Imports nothing heavy."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.text import Text

from specbeam.core.names import hint
from specbeam.doors.method_names import method_names, setting_names, settings_in
from specbeam.doors.options.checks import FORMS
from specbeam.doors.options.table import OPTIONS
from specbeam.doors.plain import as_json, for_terminal, without_control
from specbeam.errors import MissingPackage, NotSupported, ServerRefused, SpecbeamError

TIMEOUT_S = 600.0  # seconds to wait for a server's next bytes
COMMANDS = {
    "/help": "list the commands",
    "/new": "start a new conversation",
    "/regenerate": "answer the last message again, with the next seed if you set one",
    "/method": "NAME: choose another decoding method; alone: show it",
    "/set": "NAME=VALUE: change a setting of the method; alone: restore its defaults",
    "/beams": "NUMBER: the same as /set beams=NUMBER",
    "/seed": "NUMBER: the random seed of each answer; alone: a random one",
    "/save": "FILE: write the conversation to a new file; with the suffix .json as messages",
    "/quit": "end the chat (also Ctrl-D); Ctrl-C ends an answer",
}
Message = dict[str, str]


@dataclass
class Cost:
    """The cost of an answer; `passes` is None if unknown."""

    tokens: int = 0
    passes: int | None = None
    prompt_tokens: int = 0
    known_tokens: int = 0

    def __str__(self) -> str:
        parts = [f"{self.tokens} tokens"]
        if self.passes is not None and self.tokens:
            parts.append(f"{self.passes / self.tokens:.2f} passes per token")
        parts.append(f"{self.known_tokens} of {self.prompt_tokens} tokens of the prompt were cached")
        return ", ".join(parts)


@dataclass(frozen=True)
class Compiling:
    """What a speaker yields while it compiles steps: the number so far, and that of a first text; None if unknown."""

    done: int
    total: int | None

    def __str__(self) -> str:
        steps = f"{self.done} steps so far" if self.total is None else f"{self.done} of {self.total} steps"
        return f"the server compiles for its processor, once: {steps}"


class CompilingLine:
    """A line on a terminal while a speaker compiles, below which nothing is written yet."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Any = None

    def show(self, compiling: Compiling) -> None:
        """Show how far it is."""
        text = Text(str(compiling), "dim")
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def hide(self) -> None:
        """Remove the line."""
        if self._status is not None:
            self._status.stop()
            self._status = None


@dataclass(frozen=True)
class ChatOptions:
    """The decoding options of answers.

    Args:
        settings: options of generation, by the names of `specbeam.generate`.
    """

    method: str = ""
    method_settings: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None


@runtime_checkable
class Speaker(Protocol):
    """The other side of a conversation."""

    name: str
    holds_conversation: bool  # otherwise it answers each message separately

    def check(self, options: ChatOptions) -> str:
        """Return a description of the method. Raises `SpecbeamError` for wrong options."""
        ...

    def answer(self, messages: list[Message], options: ChatOptions, cost: Cost) -> "Iterator[str | Compiling]":
        """Yield the pieces of an answer, and set its cost at the end."""
        ...


class ServerSpeaker:
    """A server with OpenAI's API; only specbeam's server accepts methods and their settings."""

    def __init__(self, url: str, key: str) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise MissingPackage("--url needs httpx2: pip install httpx2") from error
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._broken = (httpx2.HTTPError, httpx2.InvalidURL)
        place = url.rstrip("/").removesuffix("/v1")
        try:
            self._http = httpx2.Client(base_url=place, headers=headers, timeout=TIMEOUT_S)
        except self._broken as error:
            raise ServerRefused(f"{url} is not the address of a server: {error}") from error
        self.name = self._model()
        props = self._props()
        self._is_specbeam = "holds_conversation" in props
        self.holds_conversation = bool(props.get("holds_conversation", True))

    def _model(self) -> str:
        try:
            found = self._http.get("/v1/models")
        except self._broken as error:
            raise ServerRefused(f"no server answers at {self._http.base_url}: {error}") from error
        self._raise_if_refused(found)
        try:
            return str(found.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerRefused(
                f"the answer of {self._http.base_url} is not of OpenAI's API: {found.text[:80]!r}"
            ) from error

    def _props(self) -> dict[str, Any]:
        """Return what the server says of itself; only specbeam's says whether its template takes several messages."""
        try:
            found = self._http.get("/props").json()
        except (*self._broken, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @staticmethod
    def _raise_if_refused(answer: Any) -> None:
        if answer.status_code == 200:
            return
        answer.read()
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = answer.text[:200]
        raise ServerRefused(f"the server answered with status {answer.status_code}: {message}")

    def check(self, options: ChatOptions) -> str:
        self._own(options)
        return options.method or "the server's method"

    @staticmethod
    def _own(options: ChatOptions) -> dict[str, Any]:
        """Return the specbeam-specific fields of a request."""
        own: dict[str, Any] = {"method": options.method} if options.method else {}
        if options.method:
            settings_in(options.method, options.method_settings)  # raises an error for wrong settings
        elif options.method_settings:
            raise NotSupported("settings need a method; choose one with --method NAME or /method NAME")
        for setting in options.method_settings:
            name, _, value = setting.partition("=")
            own[name] = _as_json(value)
        return own

    def answer(self, messages: list[Message], options: ChatOptions, cost: Cost) -> "Iterator[str | Compiling]":
        body = _fields_of(options.settings)
        body |= {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        if options.seed is not None:
            body["seed"] = options.seed
        own = body.pop("specbeam", {}) | self._own(options)
        if own or self._is_specbeam:  # with this object, even an empty one, a server of specbeam reports what it does
            body["specbeam"] = own
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                self._raise_if_refused(answer)
                yield from _pieces(answer.iter_lines(), cost)
        except self._broken as error:
            raise ServerRefused(f"the connection to the server broke: {error}") from error


def _fields_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of generation as fields of a request. Raises `NotSupported` for options without such a field."""
    body: dict[str, Any] = {}
    for name, value in options.items():
        option = OPTIONS[name]
        if option.field is None and (not option.names or name in FORMS):
            raise NotSupported(f"{name} cannot be sent to servers; leave it out")
        place = body.setdefault(option.field.inside, {}) if option.field is not None and option.field.inside else body
        place[option.names[0] if option.field is None else name] = value
    return body


def _pieces(lines: Iterator[str], cost: Cost) -> "Iterator[str | Compiling]":
    """Yield the text of a stream of events, and notes that the server compiles, and set its cost."""
    for line in lines:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ServerRefused(str(event["error"]["message"]))
        for choice in event.get("choices", ()):
            yield choice["delta"].get("content") or ""
        if usage := event.get("usage"):
            cost.tokens = usage["completion_tokens"]
            cost.prompt_tokens = usage["prompt_tokens"]
            cost.known_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        own = event.get("specbeam") or {}
        if compiling := own.get("compiling"):
            yield Compiling(compiling["done"], compiling["total"])
        if report := own.get("report"):
            cost.passes = report["target_passes"]


def _as_json(value: str) -> Any:
    try:
        return json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return value


@dataclass
class Chat:
    """A conversation.

    Args:
        speaker: the model or server.
        options: the decoding options.
        console: the output.
        read: returns a line typed by the user; raises `EOFError` at the end.
        system: the system message; "": none.

    Attributes:
        messages: the conversation so far, also with a speaker that answers each message separately.
    """

    speaker: Speaker
    options: ChatOptions
    console: Console
    read: Callable[[], str] = input
    system: str = ""
    messages: list[Message] = field(default_factory=list)
    _used: str = field(default="", init=False)  # what the speaker says of the method

    def run(self) -> None:
        """Chat until the user ends it."""
        self._begin()
        self._used = self.speaker.check(self.options)
        self._note(f"{self.speaker.name}: {self._used}. /help lists the commands.")
        if not self.speaker.holds_conversation:
            self._note(f"{self.speaker.name} answers each message separately, without the conversation before it.")
        while True:
            try:
                line = self.read().strip()
                if line == "/quit":
                    return
                if line.startswith("/") and "\n" not in line:
                    self._obey(line)
                elif line:
                    self._answer(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("\n/quit or Ctrl-D ends the chat")

    def _begin(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _obey(self, line: str) -> None:
        """Run a command that begins with a slash."""
        order, _, value = line.partition(" ")
        value = value.strip()
        options = self.options
        if order == "/new":
            self._begin()
            self._note("a new conversation")
        elif order == "/regenerate":
            self._regenerate()
        elif order == "/method":
            self._change(replace(options, method=value, method_settings=()) if value else options)
        elif order == "/set":
            self._set(value)
        elif order == "/beams" and value:
            self._set(f"beams={value}")
        elif order == "/seed":
            self._seed(value)
        elif order == "/save":
            self._save(value)
        else:
            if order not in COMMANDS:
                self._note(f"there is no command {order}{hint(order, COMMANDS)}")
            self._note("\n".join(f"{name:<12} {meaning}" for name, meaning in COMMANDS.items()))

    def _set(self, value: str) -> None:
        """Change a setting of the method, NAME=VALUE, or restore its defaults."""
        name = value.partition("=")[0]
        others = [one for one in self.options.method_settings if one.partition("=")[0] != name]
        chosen = (*others, value) if value else ()
        self._change(replace(self.options, method_settings=chosen))

    def _seed(self, value: str) -> None:
        """Choose the seed of each answer; "" for a random one."""
        try:
            seed = int(value) if value else None
        except ValueError:
            self._note(f"the seed is {value!r}; it must be a whole number")
            return
        self.options = replace(self.options, seed=seed)
        self._note("a random seed for each answer" if seed is None else f"seed {seed}")

    def _regenerate(self) -> None:
        """Answer the last message again. The old answer stays if there is no new one."""
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            self._note("there is no answer yet")
            return
        if self.options.seed is not None:
            self._seed(str(self.options.seed + 1))
        kept = self.messages
        self.messages = kept[:-2]
        if not self._answer(kept[-2]["content"]):
            self.messages = kept

    def _save(self, value: str) -> None:
        """Write the conversation to a new file."""
        if not value:
            self._note("give the name of a file: /save FILE")
            return
        place = Path(value).expanduser()
        lines = [f"{one['role']}: {one['content']}\n" for one in self.messages]
        text = as_json(self.messages) if place.suffix == ".json" else "\n".join(lines)
        try:
            with place.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            self._note(f"{place} exists already; give another name")
        except OSError as error:
            self._note(f"{place} cannot be written: {error.strerror}")
        else:
            self._note(f"{len(self.messages)} messages in {place}")

    @property
    def status(self) -> str:
        """The settings of the next answer, in a line."""
        options = self.options
        seed = "random seed" if options.seed is None else f"seed {options.seed}"
        return ", ".join([self._method, *options.method_settings, seed]) + "   /help"

    @property
    def _method(self) -> str:
        """The name of the method, or a description if a server chooses it."""
        return self._used.partition(",")[0]

    @property
    def choices(self) -> dict[str, Callable[[], Iterable[str]]]:
        """The values that complete the commands."""
        return {
            "/method": method_names,
            "/set": lambda: [f"{name}=" for name in self._settings()],
        }

    def _settings(self) -> Iterable[str]:
        """Return the names of the settings of the method; none if it is that of a server."""
        return setting_names(self._method) if self._method in method_names() else ()

    def _change(self, options: ChatOptions) -> None:
        """Use other options from now on, unless they are wrong."""
        try:
            said = self.speaker.check(options)
        except SpecbeamError as error:
            self._complain(error)
            return
        self.options = options
        self._used = said
        self._note(said)

    def _answer(self, text: str) -> bool:
        """Answer a message; return whether there is an answer.

        An interrupt keeps the partial answer in the conversation; an error discards the message.
        """
        message = {"role": "user", "content": text}
        before = [one for one in self.messages if self.speaker.holds_conversation or one["role"] == "system"]
        asked = [*before, message]
        cost = Cost()
        said: list[str] = []
        line = CompilingLine(self.console)
        try:
            with closing(self.speaker.answer(asked, self.options, cost)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    if isinstance(piece, Compiling):
                        if not said:
                            line.show(piece)
                    elif piece:
                        line.hide()
                        said.append(piece)
                        self._show(piece)
        except KeyboardInterrupt:
            line.hide()
            self._note("\n(ended)")
        except SpecbeamError as error:
            line.hide()
            if said:
                self.console.print()
            self._complain(error)
            return False
        else:
            line.hide()
            self.console.print()
            self._note(str(cost))
        self.messages = [*self.messages, message, {"role": "assistant", "content": "".join(said)}]
        return True

    def _show(self, piece: str) -> None:
        """Show a piece of an answer, without control characters other than newlines and tabs."""
        self._print(without_control(piece), end="")

    def _note(self, text: str) -> None:
        self._print(text, style="dim")

    def _complain(self, error: Exception) -> None:
        self._print(f"specbeam: {error}", style="red")

    def _print(self, text: str, end: str = "\n", style: str | None = None) -> None:
        self.console.print(Text(for_terminal(text)), end=end, style=style, soft_wrap=True)
