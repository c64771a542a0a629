"""The command `specbeam chat`: a conversation in the terminal."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbeam.doors.cli.arguments import generation
from specbeam.doors.cli.common import check_has_head, method_from, quiet_load
from specbeam.doors.cli.options import (
    Compute,
    MethodName,
    PairArguments,
    QuantizeDraft,
    QuantizeTarget,
    Settings,
    check_address,
)
from specbeam.doors.method_names import check_settings, usual_name
from specbeam.doors.model_files import require_chat_template
from specbeam.doors.places import text_of
from specbeam.engines.choices import check_what_runs

if TYPE_CHECKING:
    from specbeam.doors.cli.talking import Speaker


class ChatArguments(PairArguments):
    """Arguments of the command."""

    method: MethodName = None
    setting: Settings = []
    system: Annotated[str, typer.Option(help="System message: instructions before the conversation.")] = ""
    options: dict[str, Any] = generation(without=["num_return_sequences"], max_new_tokens=512)
    seed: Annotated[int | None, typer.Option(help="Random seed of each answer; by default random.")] = None
    chat_template: Annotated[Path | None, typer.Option(help="File with a chat template, for a model without one.")] = (
        None
    )
    url: Annotated[
        str | None, typer.Option(help="Address of a server with OpenAI's API, in place of a local model.")
    ] = None
    key: Annotated[str, typer.Option(help="API key of the server.", envvar="SPECBEAM_API_KEY")] = ""
    quantize: QuantizeTarget = None
    quantize_draft: QuantizeDraft = None
    compute: Compute = None


def chat(given: ChatArguments) -> int:
    """Chat with a model in the terminal; Ctrl-C ends an answer, Ctrl-D ends the chat."""
    template = None if given.chat_template is None else text_of(given.chat_template, "give a file with a chat template")
    if given.url is None and template is None:
        require_chat_template(given.model)
    check_what_runs(given.engine, given.compute, given.quantize, False, None, False)
    check_settings(given.method or "", given.setting)
    if given.url is not None:
        check_address(given.url)
    from specbeam.doors.cli.line_editor import line_reader
    from specbeam.doors.cli.screen import Screen
    from specbeam.doors.cli.talking import COMMANDS, Chat, ChatOptions, ServerSpeaker

    console = Screen()
    speaker: Speaker
    if given.url is not None:
        speaker = ServerSpeaker(given.url, given.key)
    else:
        from specbeam.doors.cli.pair_speaker import PairSpeaker

        has_draft = given.draft is not None or given.model == "bundled"
        method = method_from(given.method or usual_name(has_draft), given.setting)
        check_has_head(method, given.draft)
        pair = quiet_load(**given.pair, **given.named("quantize", "quantize_draft", "compute"))
        speaker = PairSpeaker(pair, given.model, template)
    options = ChatOptions(given.method or "", tuple(given.setting), given.options, given.seed)
    talk = Chat(speaker, options, console, system=given.system)
    talk.read = line_reader(console, COMMANDS, talk.choices, lambda: talk.status)
    talk.run()
    return 0
