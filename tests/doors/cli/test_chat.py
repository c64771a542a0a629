"""A conversation in the terminal: what is streamed, what is known of it, and what ends an answer or the chat."""

import contextlib
import importlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
import types

import pytest
from rich.console import Console

import specbeam as sb
from specbeam.doors.chats import BUNDLED_TEMPLATE, prompt_of_messages
from specbeam.doors.cli import pair_speaker
from specbeam.doors.cli.line_editor import _completer, history_place, line_reader
from specbeam.doors.cli.pair_speaker import PairSpeaker
from specbeam.doors.cli.talking import COMMANDS, Chat, ChatOptions, ServerSpeaker
from specbeam.errors import NotSupported, SpecbeamError
from specbeam.models.huggingface import HuggingFaceLM
from specbeam.models.pair import BUNDLED, Pair
from tests.support.slow_parts import compile_slowly
from tests.support.tiny_models import tiny

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHUNK = 16
OPTIONS = ChatOptions(settings={"max_new_tokens": 12}, seed=7)
needs_bundled = pytest.mark.skipif(not (BUNDLED / "target").is_dir(), reason="the bundled pair is not in this checkout")


@pytest.fixture(scope="module")
def pair():
    if not (BUNDLED / "target").is_dir():
        pytest.skip("the bundled pair is not in this checkout")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    models = [tiny("llama", seed=seed, vocab_size=len(tokenizer)) for seed in (1, 2)]
    lms = [HuggingFaceLM(model, chunk=CHUNK, engine="plain", share_from=None) for model in models]
    yield Pair(*models, tokenizer, *lms)
    for lm in lms:
        lm.forget_prompts()


class Terminal(io.StringIO):
    """A screen; `after` is called with what was written to it so far."""

    def __init__(self):
        super().__init__()
        self.after = None

    def write(self, text):
        size = super().write(text)
        if self.after is not None:
            self.after(self.getvalue())
        return size


class Keyboard:
    """Types these lines; an exception among them is raised."""

    def __init__(self, *lines):
        self.lines = [*lines]

    def __call__(self):
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


def talk(speaker, *lines, options=OPTIONS, screen=None, system=""):
    """A chat in which these lines are typed, and what its screen shows."""
    screen = screen or Terminal()
    one = Chat(speaker, options, Console(file=screen, width=200), Keyboard(*lines), system)
    one.run()
    return one, screen.getvalue()


def test_a_conversation_streams_the_texts_of_the_library_and_computes_what_is_known_once(pair, monkeypatch):
    monkeypatch.setattr(pair_speaker, "CHUNK", CHUNK)
    speaker = PairSpeaker(pair, "tiny", TEMPLATE)
    lines = ["Ein Hund läuft durch den Wald und sucht seinen Freund.", "Wo ist mein Hut?", "Ich habe Hunger."]
    one, shown = talk(speaker, *lines, system="Antworte kurz.")
    told = [{"role": "system", "content": "Antworte kurz."}]
    for line in lines:
        told.append({"role": "user", "content": line})
        prompt = "".join(f"{one['role']}: {one['content']}\n" for one in told) + "assistant: "
        (expected,) = sb.generate(pair, prompt, seed=7, max_new_tokens=12)
        told.append({"role": "assistant", "content": expected.text})
    assert one.messages == told
    printable = "".join(letter for letter in told[2]["content"] if letter.isprintable() or letter in "\n\t")
    assert printable in shown
    known = [int(line.split("token, ")[1].split()[0]) for line in shown.splitlines() if "were cached" in line]
    assert len(known) == 3
    assert known[0] == 0
    assert 0 < known[1] < known[2]
    assert all(count % CHUNK == 0 for count in known)


def test_settings_change_between_messages_and_wrong_ones_change_nothing(pair):
    speaker = PairSpeaker(pair, "tiny", TEMPLATE)
    one, shown = talk(
        speaker, "/method dsbd", "/set beams=3", "/set beams=2", "/set depth=x", "/set none=1", "/method nothing",
        "/help", "Hallo.", "/new", "/unknown", "  ", "Hallo.",
    )  # fmt: skip
    assert one.options == ChatOptions("dsbd", ("beams=2",), OPTIONS.settings, 7)
    assert "2 beams" in shown
    assert shown.count("specbeam: ") == 3
    assert "none" in shown
    (expected,) = sb.generate(pair, "user: Hallo.\nassistant: ", sb.dsbd(beams=2), seed=7, max_new_tokens=12)
    assert one.messages == [{"role": "user", "content": "Hallo."}, {"role": "assistant", "content": expected.text}]
    assert shown.count("/quit") == 2  # the help, asked for and after what it does not know
    reset, _ = talk(speaker, "/method dsbd", "/set beams=2", "/set", "/quit", "never read")
    assert reset.options.method_settings == ()


def test_an_interrupt_ends_an_answer_and_leaves_what_was_said_and_the_models_free(pair, monkeypatch, request):
    # A fast machine would write the whole answer before it shows the first piece.
    monkeypatch.setattr(importlib.import_module("specbeam.core.decode"), "DELAY_S", 0)
    # A shell that started the tests in the background lets them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    speaker = PairSpeaker(pair, "tiny", TEMPLATE)
    screen = Terminal()
    begun = []

    def interrupt(shown):
        if shown.partition("\n")[2] and not begun:  # the first piece of the answer, after the greeting
            begun.append(shown)
            signal.raise_signal(signal.SIGINT)

    screen.after = interrupt
    options = ChatOptions(settings={"max_new_tokens": 60}, seed=7)
    one, shown = talk(speaker, "Hallo.", KeyboardInterrupt(), "Noch einmal.", options=options, screen=screen)
    assert begun
    assert "(ended)" in shown
    assert "Ctrl-D" in shown.split("(ended)")[1]
    assert [message["role"] for message in one.messages] == ["user", "assistant"] * 2
    whole = sb.generate(pair, "user: Hallo.\nassistant: ", seed=7, max_new_tokens=60)[0].text
    assert whole.startswith(one.messages[1]["content"])
    assert whole != one.messages[1]["content"]
    assert pair.target.caches + pair.draft.caches == []


def test_an_error_costs_its_message_alone_and_control_characters_do_not_reach_the_terminal(pair):
    class Breaks(PairSpeaker):
        def answer(self, messages, options, cost):
            yield "\x1b[2Jtext\r\x07 [bold]x"
            if "break" in messages[-1]["content"]:
                raise SpecbeamError("no more today")

    one, shown = talk(Breaks(pair, "tiny", TEMPLATE), "break", "go on")
    assert "specbeam: no more today" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[2Jtext [bold]x" in shown
    assert [message["content"] for message in one.messages] == ["go on", "\x1b[2Jtext\r\x07 [bold]x"]
    too_long, shown = talk(PairSpeaker(pair, "tiny", TEMPLATE), "lang " * 2000, "Hallo.")
    assert "specbeam: " in shown
    assert len(too_long.messages) == 2
    with pytest.raises(NotSupported, match="--chat-template"):
        PairSpeaker(pair, "tiny", None)


def test_the_bundled_model_answers_each_message_by_itself(pair):
    one, shown = talk(PairSpeaker(pair, "bundled", None), "Hallo.", "Wo ist mein Hut?")
    assert "answers each message separately" in shown
    assert [message["content"] for message in one.messages[::2]] == ["Hallo.", "Wo ist mein Hut?"]
    for message, answer in zip(one.messages[::2], one.messages[1::2], strict=True):
        prompt = prompt_of_messages(pair.tokenizer, BUNDLED_TEMPLATE, [message])
        assert answer["content"] == sb.generate(pair, prompt, seed=7, max_new_tokens=12)[0].text


def test_an_answer_is_drawn_again_with_the_next_seed_and_other_beams(pair):
    speaker = PairSpeaker(pair, "tiny", TEMPLATE)
    one, shown = talk(speaker, "/regenerate", "Hallo.", "/beams 2", "/seed 20", "/regenerate", "/seed x", "/beams no")
    assert "there is no answer yet" in shown
    assert "seed 21" in shown
    assert "the seed is 'x'" in shown
    assert one.options == ChatOptions("", ("beams=2",), OPTIONS.settings, 21)
    prompt = "user: Hallo.\nassistant: "
    (expected,) = sb.generate(pair, prompt, sb.dsbd(beams=2), seed=21, max_new_tokens=12)
    assert one.messages == [{"role": "user", "content": "Hallo."}, {"role": "assistant", "content": expected.text}]
    free, _ = talk(speaker, "/seed")
    assert free.options.seed is None


def test_a_failed_second_answer_leaves_the_first_one(pair):
    class Breaks(PairSpeaker):
        times = 0

        def answer(self, messages, options, cost):
            self.times += 1
            if self.times > 1:
                raise SpecbeamError("no more today")
            yield "the first"

    one, shown = talk(Breaks(pair, "tiny", TEMPLATE), "Hallo.", "/regenerate")
    assert "no more today" in shown
    assert [message["content"] for message in one.messages] == ["Hallo.", "the first"]


def test_a_conversation_is_saved_to_a_new_file_only(pair, tmp_path):
    speaker = PairSpeaker(pair, "tiny", TEMPLATE)
    there = tmp_path / "there.txt"
    there.write_text("mine")
    one, shown = talk(
        speaker, "Hallo.", f"/save {tmp_path}/talk.json", f"/save {tmp_path}/talk.txt", f"/save {there}",
        f"/save {tmp_path}/none/talk.txt", "/save", system="Kurz.",
    )  # fmt: skip
    assert json.loads((tmp_path / "talk.json").read_text()) == one.messages
    assert (tmp_path / "talk.txt").read_text().startswith("system: Kurz.\n\nuser: Hallo.\n\nassistant: ")
    assert there.read_text() == "mine"
    assert "exists already" in shown
    assert "cannot be written: No such file" in shown
    assert "give the name of a file" in shown


@pytest.fixture
def keyboard(monkeypatch, tmp_path):
    """A keyboard for the line editor, with a data folder of its own."""
    application = pytest.importorskip("prompt_toolkit.application")
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    with create_pipe_input() as keys, application.create_app_session(input=keys, output=DummyOutput()):
        yield keys


def editor(screen=None):
    console = Console(file=screen or Terminal(), force_terminal=True, width=200, _environ={"TERM": "xterm"})
    choices = {"/method": lambda: ["dsbd", "greedy"]}
    return line_reader(console, COMMANDS, choices, lambda: "dsbd, seed 7")


def test_the_line_editor_has_a_history_that_only_its_user_can_read(keyboard, tmp_path):
    read = editor()
    keyboard.send_text("Wo ist\x1b\rmein Hut?\r")
    assert read() == "Wo ist\nmein Hut?"
    keyboard.send_text("\x1b[A\r")  # up, in another chat
    assert editor()() == "Wo ist\nmein Hut?"
    place = history_place()
    assert place == tmp_path / "specbeam" / "chat_history"
    assert place.stat().st_mode & 0o777 == 0o600
    keyboard.send_text("\x04")
    with pytest.raises(EOFError):
        read()
    keyboard.send_text("half\x03")
    with pytest.raises(KeyboardInterrupt):
        read()


def test_without_a_place_for_its_history_the_line_editor_says_so(keyboard, tmp_path):
    (tmp_path / "specbeam").write_text("a file")
    screen = Terminal()
    read = editor(screen)
    assert "no history is kept" in screen.getvalue()
    keyboard.send_text("Hallo.\r")
    assert read() == "Hallo."


def test_commands_and_their_values_are_completed_and_messages_are_not():
    pytest.importorskip("prompt_toolkit")
    from prompt_toolkit.document import Document

    completer = _completer(COMMANDS, {"/method": lambda: ["greedy", "dsbd", "dyspec"]})

    def found(text):
        return [one.text for one in completer.get_completions(Document(text), None)]

    assert found("/s") == ["/set", "/seed", "/save"]
    assert found("/method d") == ["dsbd", "dyspec"]
    assert found("Was ist /s") == []
    assert found("") == []


def test_lines_of_a_pipe_are_read_as_they_come(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hallo.\n/quit\n"))
    screen = Terminal()
    read = line_reader(Console(file=screen), COMMANDS, {}, lambda: "")
    assert [read(), read()] == ["Hallo.", "/quit"]
    with pytest.raises(EOFError):
        read()


def test_a_server_is_talked_with_in_the_same_way(pair, tmp_path):
    pytest.importorskip("uvicorn")
    pytest.importorskip("httpx2")
    from tests.apps.serve.test_server import CONFIG, running

    with pytest.raises(SpecbeamError, match="no server answers"):
        ServerSpeaker("http://127.0.0.1:9", "")
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    lines = ["Hallo.", "Wo ist mein Hut?"]
    expected, _ = talk(PairSpeaker(pair, "tiny", TEMPLATE), "/method dsbd", "/set beams=2", *lines)
    config = CONFIG.__class__(**vars(CONFIG) | {"chat_template": str(template), "api_keys": ("secret",)})
    with running(config, pair) as (url, _):
        with pytest.raises(SpecbeamError, match="401"):
            ServerSpeaker(url, "")
        speaker = ServerSpeaker(url + "/v1", "secret")
        one, shown = talk(speaker, "/set beams=2", "/method dsbd", "/set beams=2", *lines)
        assert one.messages == expected.messages
        assert "choose one with" in shown
        assert "passes per token" in shown
        _, shown = talk(speaker, "lang " * 2000, "Hallo.")
        assert "the server answered with status 400" in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_that_the_server_compiles_until_the_text_begins(pair, tmp_path, monkeypatch, is_terminal):
    pytest.importorskip("uvicorn")
    pytest.importorskip("httpx2")
    from tests.apps.serve.test_server import CONFIG, running

    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    config = CONFIG.__class__(**vars(CONFIG) | {"chat_template": str(template)})
    screen = Terminal()
    with running(config, pair) as (url, _):
        speaker = ServerSpeaker(url, "")
        compile_slowly(monkeypatch)
        chat = Chat(speaker, OPTIONS, Console(file=screen, width=200, force_terminal=is_terminal), Keyboard("Hallo."))
        chat.run()
    answer = chat.messages[-1]["content"]
    assert answer
    shown = screen.getvalue()
    assert ("the server compiles for its processor, once: " in shown) == is_terminal
    assert answer in shown.rpartition("once: ")[2]


class Screen:
    """A command on a pseudo-terminal, as a user has it."""

    def __init__(self, kind, folder, *arguments):
        self.leader, follower = pty.openpty()
        command = [sys.executable, "-m", "specbeam", "chat", *arguments]
        environment = {**os.environ, "TERM": kind, "XDG_DATA_HOME": str(folder), "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, env=environment,
            preexec_fn=lambda: os.login_tty(follower),
        )  # fmt: skip
        os.close(follower)
        self.seen = ""

    def wait_for(self, text):
        """Read until the screen shows a text after what was waited for before."""
        assert self.shows(text, 300), self.seen

    def shows(self, text, seconds):
        """Read until the screen shows a text; return whether it did within some seconds."""
        end = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < end:
            if select.select([self.leader], [], [], 1)[0]:
                self.seen += os.read(self.leader, 4096).decode(errors="replace")
        found = text in self.seen
        if found:
            _, _, self.seen = self.seen.partition(text)
        return found

    def type(self, text):
        os.write(self.leader, text.encode())

    def press_until(self, key, text):
        """Press a key every ten seconds until the screen shows a text.

        A signal that comes after Python looked for signals and before it waits for a line is seen with the next one.
        """
        for _ in range(30):
            self.type(key)
            if self.shows(text, 10):
                return
        raise AssertionError(self.seen)

    def wait_for_prompt(self, kind):
        """Wait for the next prompt; what is typed before the line editor reads key by key would not reach it."""
        self.wait_for("> " if kind == "dumb" else ">")  # the line editor moves the cursor in place of a space
        while kind != "dumb" and termios.tcgetattr(self.leader)[3] & termios.ICANON:
            time.sleep(0.01)

    def end(self, seconds=60):
        """Read until the command is over, and return its exit code; a terminal that nobody reads would hold it up."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            if select.select([self.leader], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the other side is closed
                    self.seen += os.read(self.leader, 4096).decode(errors="replace")
        return self.process.poll()


@needs_bundled
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dumb", "xterm"])
def test_on_a_terminal_control_c_ends_an_answer_and_control_d_the_chat(kind, tmp_path):
    screen = Screen(kind, tmp_path, "--max-new-tokens", "200", "--seed", "1")
    screen.wait_for_prompt(kind)
    screen.type("Ein Hund läuft.\r")
    screen.wait_for("were cached")
    screen.wait_for_prompt(kind)
    screen.press_until("\x03", "Ctrl-D ends the chat")
    screen.wait_for_prompt(kind)
    screen.type("Wo ist mein Hut?\r")
    screen.wait_for("were cached")
    screen.wait_for_prompt(kind)
    screen.type("\x04")
    assert screen.end() == 0, screen.seen
