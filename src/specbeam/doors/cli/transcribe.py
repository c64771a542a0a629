"""The command `specbeam transcribe`: transcripts of audio files, in several formats."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specbeam.core.whole_files import write_whole
from specbeam.doors.cli.arguments import Record
from specbeam.doors.cli.common import check_has_head, complain, method_from, print_json, quiet_load, say
from specbeam.doors.cli.options import (
    Compute,
    Device,
    Engine,
    KeysAndValues,
    QuantizeTarget,
    Settings,
    Threads,
    check_draft,
    checked,
    complete_method,
)
from specbeam.doors.method_names import setting_names, settings_in
from specbeam.doors.model_files import check_model, check_spoken_language, require_speech_model, spoken_languages
from specbeam.doors.places import require_folder_place
from specbeam.errors import BadAudio, BadSetting, MissingFile

if TYPE_CHECKING:
    from rich.progress import Progress

    from specbeam.apps.speech.records import Segment
    from specbeam.recipes.method import Method

SUBTITLES = ("srt", "vtt")
ENDINGS = {"text": "txt", "json": "json", "verbose_json": "json", "srt": "srt", "vtt": "vtt"}
# Options of `specbeam.transcribe` with defaults of its own.
IF_GIVEN = ("compression_ratio_threshold", "log_prob_threshold", "no_speech_threshold", "max_new_tokens")
ALWAYS = (
    "language", "task", "prompt", "timestamps", "temperature", "best_of", "seed", "condition_on_previous_text",
)  # fmt: skip


def complete_language(context: typer.Context, incomplete: str) -> list[str]:
    """Return the codes of the model's languages that begin so, for completion by the shell."""
    return [code for code in spoken_languages(context.params.get("model") or "") if code.startswith(incomplete)]


def _check_output(folder: Path) -> None:
    """Raise `BadSetting` for a folder that is meant as a file, and `CannotWrite` if it cannot be written."""
    if folder.suffix[1:] in ENDINGS.values() and not folder.is_dir():
        raise BadSetting(
            f"--output {folder} would be a folder; give the name of a folder, or write to a file by > {folder}"
        )
    require_folder_place(folder)


class TranscribeArguments(Record):
    """Arguments of the command."""

    audio: Annotated[list[Path], typer.Argument(help="Audio files: WAV, FLAC, MP3, OGG, M4A, MP4, WebM and others.")]
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Whisper model: a path or a hub id.", callback=checked(check_model)),
    ]
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "-d",
            help="Draft model: a smaller Whisper model with the same tokenizer, by path or hub id; or 'int8' or 'int4', the "
            "model itself with rounded weights. By default none.",
            callback=checked(check_draft),
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            help="Method at temperature 0; by default beam search with 5 beams, speculative with a draft.",
            callback=checked(setting_names),
            autocompletion=complete_method,
        ),
    ] = None
    setting: Settings = []
    language: Annotated[
        str | None,
        typer.Option(
            help="Language of the speech, such as 'de' or 'german'; by default detected.",
            autocompletion=complete_language,
        ),
    ] = None
    task: Annotated[
        Literal["transcribe", "translate"] | None,
        typer.Option(
            help="'transcribe', or 'translate' into English; by default the model's own setting, or 'transcribe'."
        ),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "--initial-prompt",
            help="Text presented to the model as the preceding transcript, for names and spelling.",
        ),
    ] = None
    condition_on_previous_text: Annotated[
        bool | None,
        typer.Option(help="Prompt each window with the text before it; by default the model's own setting, or off."),
    ] = None
    format: Annotated[
        Literal["text", "json", "verbose_json", "srt", "vtt"],
        typer.Option("--format", "-f", help="Format of the output."),
    ] = "text"
    max_line_width: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of characters per line of subtitles.")
    ] = None
    max_line_count: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of lines per cue; longer segments are split into several cues."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            help="Output folder, with a file per audio file, which replaces an older one; by default, standard output.",
            callback=checked(_check_output),
        ),
    ] = None
    timestamps: Annotated[
        bool, typer.Option(help="Let the model write timestamps, which split the text into segments.")
    ] = True
    temperature: Annotated[
        list[float],
        typer.Option(
            min=0, help="Temperature. May be given several times: the next one is used for texts that fail a threshold."
        ),
    ] = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    best_of: Annotated[
        int, typer.Option(min=1, help="Number of texts to draw at temperatures above 0; the best one is kept.")
    ] = 5
    compression_ratio_threshold: Annotated[
        float | None,
        typer.Option(help="Decode texts with a higher zlib compression ratio again; by default 2.4."),
    ] = None
    log_prob_threshold: Annotated[
        float | None,
        typer.Option(
            "--log-prob-threshold",
            "--logprob-threshold",
            help="Decode texts with a lower mean log-likelihood per token again; by default the model's own setting, or -1.",
        ),
    ] = None
    no_speech_threshold: Annotated[
        float | None,
        typer.Option(
            help="Omit unlikely texts of windows with a higher probability of silence; by default the model's own setting, "
            "or 0.6."
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of tokens per window; by default the model's limit."),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Random seed; the same seed gives the same text. By default random.")
    ] = None
    device: Device = None
    quantize: QuantizeTarget = None
    kv: KeysAndValues = None
    compute: Compute = None
    engine: Engine = "auto"
    threads: Threads = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of `specbeam.transcribe`."""
        given = {name: value for name, value in self.named(*IF_GIVEN).items() if value is not None}
        return self.named(*ALWAYS) | given


def transcribe(given: TranscribeArguments) -> int:
    """Transcribe audio files with a Whisper model.

    Of several files, the name of each stands in a line above its text, and as "file" in its JSON; subtitles need --output.
    """
    from specbeam.apps.speech.formats import check_format, formatted

    lines = given.named("max_line_width", "max_line_count")
    check_format(given.format, **lines)
    if len(given.audio) > 1 and given.output is None and given.format in SUBTITLES:
        raise BadSetting(
            f"the cues of {len(given.audio)} audio files cannot follow each other in one output; give --output FOLDER, or "
            "one file"
        )
    settings_in(given.method or "beam_search", given.setting)
    require_speech_model(given.model)
    check_spoken_language(given.model, given.language)
    readable = [number for number, file in enumerate(given.audio) if _is_readable(file)]
    if not readable:
        return 2
    method = _method_of(given)
    if method is not None:
        check_has_head(method, given.draft)
    files = given.audio
    targets = [] if given.output is None else _targets(files, given.output, given.format)
    from specbeam.apps.speech.transcribe import check_method_is_used
    from specbeam.apps.speech.transcribe import transcribe as transcribed

    check_method_is_used(method, given.temperature)
    loaded = given.named("device", "quantize", "kv", "compute", "engine")
    pair = quiet_load(given.model, given.draft, sources=True, hears=True, **loaded)
    failed = len(files) - len(readable)
    is_one = len(files) == 1
    prints_segments = given.output is None and given.format == "text"  # a line per segment, as soon as it is there
    on_segment = _print_segment if prints_segments else None
    with _progress_bar() as bar:
        for number in readable:
            file = files[number]
            if prints_segments and not is_one:
                say(f"{file}:")
            show = partial(_show, bar, bar.add_task(file.name, total=None, seconds=""))
            try:
                (found,) = transcribed(pair, file, method, on_progress=show, on_segment=on_segment, **given.options)
            except (BadAudio, MissingFile) as error:
                complain(str(error))
                failed += 1
                continue
            text = formatted(found, given.format, **lines)
            if given.output is not None:
                write_whole(targets[number], text.encode("utf-8"))
                print(targets[number], flush=True)
            elif not prints_segments and is_one:
                print(text, end="", flush=True)
            elif not prints_segments:
                print_json({"file": str(file), **json.loads(text)})
    return 1 if failed else 0


def _method_of(given: TranscribeArguments) -> "Method | None":
    """Return the method at temperature 0; None for the usual one with its usual settings."""
    if given.method is None and not given.setting:
        return None
    if given.method is not None:
        return method_from(given.method, given.setting)
    usual = "beam_search" if given.draft is None else "speculative_beam_search"
    return method_from(usual, ["beams=5", *given.setting])


def _print_segment(number: int, segment: "Segment") -> None:
    """Print the text of a segment, as the format "text" does."""
    if text := segment.text.strip():
        say(text)


def _progress_bar() -> "Progress":
    """Return a bar that shows the seconds of audio that are done, and the time left."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    from specbeam.doors.cli.screen import progress_bar

    name, seconds = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[seconds]}"))
    return progress_bar(name, BarColumn(), seconds, TimeRemainingColumn())


def _show(bar: "Progress", task: Any, number: int, done: float, total: float) -> None:
    """Show the seconds of a recording that are done."""
    bar.update(task, completed=done, total=total, seconds=f"{done:.0f} of {total:.0f} s")


def _is_readable(file: Path) -> bool:
    """Return whether a file can be read; print a message if not."""
    from specbeam.apps.speech.audio import check_file

    try:
        check_file(file)
    except (BadAudio, MissingFile) as error:
        complain(str(error))
        return False
    return True


def _targets(files: list[Path], folder: Path, format: str) -> list[Path]:
    """Return the output file of each audio file. Raises `BadSetting` if two are the same."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / f"{file.stem}.{ENDINGS[format]}" for file in files]
    twice = {target for target in targets if targets.count(target) > 1}
    if twice:
        raise BadSetting(
            f"several transcripts would be written to {min(twice)}; rename the audio files, or transcribe them separately"
        )
    return targets
