"""The command `specbeam transcribe`: what is said in audio files, in one of several formats."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specbeam.core.whole_files import write_whole
from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import complain, method_from, quiet_load
from specbeam.doors.cli.options import Draft, KeysAndValues, QuantizeTarget, Settings
from specbeam.errors import BadAudio, BadSetting, MissingFile

ENDINGS = {"text": "txt", "json": "json", "verbose_json": "json", "srt": "srt", "vtt": "vtt"}
# Options of `specbeam.transcribe` that have its own default unless they are given.
IF_GIVEN = ("compression_ratio_threshold", "log_prob_threshold", "no_speech_threshold", "max_new_tokens")
ALWAYS = (
    "language", "task", "prompt", "timestamps", "temperature", "best_of", "seed", "condition_on_previous_text",
)  # fmt: skip


class TranscribeArguments(Record):
    """What the command is given."""

    audio: Annotated[
        list[Path], typer.Argument(help="Files with sound: WAV, FLAC, MP3, OGG, M4A, MP4, WebM and others.")
    ]
    model: Annotated[str, typer.Option("--model", "-m", help="Whisper model: a path or a hub id.")]
    draft: Draft = None
    method: Annotated[
        str | None,
        typer.Option(
            help="Method at temperature 0; by default beam search with 5 beams, with drafts if there is a draft."
        ),
    ] = None
    setting: Settings = []
    language: Annotated[
        str | None, typer.Option(help="Language of the speech, like 'de' or 'german'; by default the model detects it.")
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="'transcribe', or 'translate' for English text; by default the model's own, or 'transcribe'."
        ),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "--initial-prompt",
            help="A text that the model takes for what was said before, for names and spelling.",
        ),
    ] = None
    condition_on_previous_text: Annotated[
        bool | None,
        typer.Option(
            help="Whether each window has the text before it as its prompt; by default the model's own, or not."
        ),
    ] = None
    format: Annotated[
        str, typer.Option("--format", "-f", help="Format of the output: text, json, verbose_json, srt or vtt.")
    ] = "text"
    max_line_width: Annotated[int | None, typer.Option(help="Maximum number of characters in a line of subtitles.")] = (
        None
    )
    max_line_count: Annotated[
        int | None, typer.Option(help="Maximum number of lines of a cue; a segment that has more becomes several cues.")
    ] = None
    output: Annotated[
        Path | None, typer.Option(help="Folder for one file per audio; by default all is written to standard output.")
    ] = None
    timestamps: Annotated[
        bool, typer.Option(help="Whether the model writes timestamps, which cut the text into segments.")
    ] = True
    temperature: Annotated[
        list[float],
        typer.Option(help="Temperature; if given several times, the next one is for texts that fail a threshold."),
    ] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    best_of: Annotated[int, typer.Option(help="Number of texts drawn above temperature 0.")] = 5
    compression_ratio_threshold: Annotated[
        float | None,
        typer.Option(help="Texts that zlib makes smaller than by this factor are decoded again; by default 2.4."),
    ] = None
    log_prob_threshold: Annotated[
        float | None,
        typer.Option(
            "--log-prob-threshold",
            "--logprob-threshold",
            help="Texts of less average log-likelihood per token are decoded again; by default the model's own, or -1.",
        ),
    ] = None
    no_speech_threshold: Annotated[
        float | None,
        typer.Option(
            help="Unlikely texts of windows with more odds of silence are left out; by default the model's own, or 0.6."
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens per window; by default as many as the model has room for."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text; by default random.")] = None
    device: Annotated[
        str | None, typer.Option(help="Device of the models: cpu, cuda, ...; by default a GPU if there is one.")
    ] = None
    quantize: QuantizeTarget = None
    kv: KeysAndValues = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `specbeam.transcribe`."""
        optional = {name: getattr(self, name) for name in IF_GIVEN}
        given = {name: value for name, value in optional.items() if value is not None}
        return {name: getattr(self, name) for name in ALWAYS} | given


def transcribe(given: TranscribeArguments) -> int:
    """Write down what is said in audio files, by a Whisper model."""
    from specbeam.apps.speech.formats import check_format, formatted
    from specbeam.apps.speech.transcribe import transcribe as transcribed

    lines = {"max_line_width": given.max_line_width, "max_line_count": given.max_line_count}
    check_format(given.format, **lines)
    if given.setting and given.method is None:
        raise BadSetting("--set is for the settings of a method; give --method too")
    method = None if given.method is None else method_from(given.method, given.setting)
    files = given.audio
    targets = [] if given.output is None else _targets(files, given.output, given.format)
    readable = [number for number, file in enumerate(files) if _is_readable(file)]
    loaded = {"device": given.device, "quantize": given.quantize, "kv": given.kv}
    if not readable and not any(loaded.values()):  # otherwise it shows whether the model can be loaded like this
        return 1
    pair = quiet_load(given.model, given.draft, sources=True, **loaded)
    failed = len(files) - len(readable)
    for number in readable:
        try:
            (found,) = transcribed(pair, files[number], method, **given.options)
        except (BadAudio, MissingFile) as error:
            complain(str(error))
            failed += 1
            continue
        text = formatted(found, given.format, **lines)
        if given.output is None:
            print(text, end="", flush=True)
        else:
            write_whole(targets[number], text.encode("utf-8"))
    return 1 if failed else 0


def _is_readable(file: Path) -> bool:
    """Return whether a file can be read, as far as its beginning shows; complain if it cannot."""
    from specbeam.apps.speech.audio import check_file

    try:
        check_file(file)
    except (BadAudio, MissingFile) as error:
        complain(str(error))
        return False
    return True


def _targets(files: list[Path], folder: Path, format: str) -> list[Path]:
    """Return the file that the transcript of each audio is written to. Raises `BadSetting` if two have one name."""
    if folder.exists() and not folder.is_dir():
        raise BadSetting(f"{folder} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / f"{file.stem}.{ENDINGS[format]}" for file in files]
    twice = {target for target in targets if targets.count(target) > 1}
    if twice:
        raise BadSetting(
            f"several files would be written to {min(twice)}; give them other names, or transcribe them apart"
        )
    return targets
