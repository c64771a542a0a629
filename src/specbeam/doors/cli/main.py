"""The command line. Each command is a file that reads arguments, calls one public function and prints the result."""

import atexit
import logging
import os
import signal
import sys
import warnings
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer import BadParameter

from specbeam.doors.cli import (
    bench_anchors,
    bench_cliffs,
    bench_host,
    bench_methods,
    bench_paper,
    bench_passes,
    bench_serve,
    bench_specbench,
    bench_speed,
    evaluate,
    heads,
    train_memory,
)
from specbeam.doors.cli.arguments import PlainCommand, PlainGroup, add_command, command_group
from specbeam.doors.cli.batch import batch
from specbeam.doors.cli.bench import acceptance, efficiency
from specbeam.doors.cli.best import best
from specbeam.doors.cli.chat import chat
from specbeam.doors.cli.common import INTERRUPTED, complain
from specbeam.doors.cli.defaults import place_of_defaults, read_defaults
from specbeam.doors.cli.demo import demo
from specbeam.doors.cli.diff import diff
from specbeam.doors.cli.env import env
from specbeam.doors.cli.fuzz import fuzz
from specbeam.doors.cli.generate import generate
from specbeam.doors.cli.harness import AS_GIVEN, harness
from specbeam.doors.cli.inspect import inspect
from specbeam.doors.cli.methods import methods
from specbeam.doors.cli.serve import serve
from specbeam.doors.cli.train import add_training
from specbeam.doors.cli.transcribe import transcribe
from specbeam.doors.cli.tune import tune
from specbeam.doors.method_names import setting_meant
from specbeam.doors.plain import for_terminal
from specbeam.errors import BadPrompt, SpecbeamError

HELP = {"--help", "-h"}
OF_ALL = ("--verbose", "-v", "--quiet", "-q", "--version")  # options before the command


class Commands(PlainGroup):
    """Commands whose errors reach `main`, including errors that typer would handle."""

    def invoke(self, context: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(context)
        except BadParameter as error:
            if context.default_map:
                error.message = f"{error.message} (on the command line, or in {place_of_defaults()})"
            raise
        except BrokenPipeError as error:
            raise ClosedPipe from error
        except KeyboardInterrupt as error:  # typer would end without a word
            raise Interrupted from error
        except EOFError as error:  # typer would print "Aborted"
            raise BadPrompt(f"a file ends too early: {error}") from error
        except Exception as error:
            if hasattr(error, "possibilities"):  # of an unknown option; its class differs between versions of typer
                error.message = f"{error.message}{_advice(error)}"  # type: ignore[attr-defined]
            raise


def _advice(error: Any) -> str:
    """Return a hint for an option of all commands, or for a setting of methods at a command with settings; otherwise ""."""
    if error.option_name in OF_ALL:
        return f"; it stands before the command: specbeam {error.option_name} {error.ctx.info_name} ..."
    takes_settings = any("--set" in one.opts for one in error.ctx.command.params)
    name = error.option_name.lstrip("-").replace("-", "_")
    if takes_settings and name == "do_sample":
        return "; methods sample, unless their name says greedy or search: leave it out"
    _, setting = setting_meant(name)
    return f"; it is a setting of methods: --set {setting}=..." if takes_settings and setting else ""


class Interrupted(Exception):
    """Raised for an interrupt."""


class ClosedPipe(Exception):
    """Raised when the reader of standard output has closed it."""


app = command_group(
    "Generate text with language models and speculative beam decoding. To begin: specbeam demo.",
    cls=Commands,
    pretty_exceptions_enable=False,
)


def print_version(is_asked: bool) -> bool:
    """Print the version and exit, if `--version` is given."""
    if is_asked:
        from specbeam import __version__

        print(__version__)
        raise typer.Exit
    return is_asked


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and exit.")
]


@app.callback()
def start(
    context: typer.Context,
    version: Version = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens on standard error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no warnings.")] = False,
) -> None:
    """Prepare the process for a command."""
    from specbeam.doors.cli.screen import progress_console
    from specbeam.doors.progress import VARIABLE, show_compilation, shows_progress

    word_warnings()
    try:
        context.default_map = read_defaults(context.command)
    except SpecbeamError as error:
        if not HELP & set(sys.argv):
            raise
        complain(f"{error} (the help below is without it)")
    if verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("specbeam").setLevel(logging.INFO)
    if not sys.warnoptions:  # of Python: -W and PYTHONWARNINGS
        warnings.simplefilter("ignore", FutureWarning)  # for developers of the libraries that call each other here
    if quiet:
        os.environ[VARIABLE] = "off"
        warnings.simplefilter("ignore")
    if shows_progress(progress_console()):  # elsewhere loading a model does it, as this imports numba
        show_compilation(progress_console())


def word_warnings() -> None:
    """Print warnings as sentences, without the line of the source that gives them."""

    def worded(message: Warning | str, *place: object, **line: object) -> str:
        return f"specbeam: warning: {for_terminal(str(message))}\n"

    warnings.formatwarning = worded


for command in (generate, best, batch, transcribe, methods, inspect, serve, chat, tune, demo, env):
    add_command(app, command)

checks = command_group("Check and score outputs of decoding methods.")
checks.command("harness", cls=PlainCommand, context_settings=AS_GIVEN)(harness)
add_command(checks, evaluate.same_beams)
add_command(checks, diff)
add_command(checks, fuzz)
add_command(checks, evaluate.perplexity)
add_command(checks, evaluate.theory)
app.add_typer(checks, name="evaluate")

measures = command_group("Measure speed, quality and acceptance of decoding methods.")
add_command(measures, efficiency)
add_command(measures, acceptance)
add_command(measures, bench_specbench.specbench)
add_command(measures, bench_methods.methods)
add_command(measures, bench_paper.paper)
add_command(measures, bench_anchors.anchors)
add_command(measures, bench_host.host)
add_command(measures, bench_speed.speed)
add_command(measures, bench_cliffs.cliffs)
add_command(measures, bench_serve.serve)
add_command(measures, bench_passes.passes)
app.add_typer(measures, name="bench")

trainings = command_group("Train draft models, draft heads and memories.")
add_training(trainings)
add_command(trainings, train_memory.train_memory, "hmt")
app.add_typer(trainings, name="train")

draft_heads = command_group("Inspect draft heads.")
draft_heads.callback()(lambda: None)  # keeps the name of its only command
add_command(draft_heads, heads.inspect)
app.add_typer(draft_heads, name="heads")


def main() -> None:
    """Run the command line.

    Errors that the user can correct, and errors of the system such as a full disk, are printed as a sentence on standard
    error, with exit code 2. An interrupt gives exit code 130, a closed output pipe 141.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except (KeyboardInterrupt, Interrupted):
        _end("interrupted", INTERRUPTED)
    except (BrokenPipeError, ClosedPipe):
        _end("", 141)
    except UnicodeEncodeError as error:
        _end(
            f"standard output is in {error.encoding}, which has no {error.object[error.start : error.end]!r}; set "
            "PYTHONIOENCODING=utf-8",
            2,
        )
    except OSError as error:
        _end(_sentence_of(error), 2)
    except SpecbeamError as error:
        _end(str(error), 2)


def program() -> None:
    """Run the command line as a program. An interrupt ends it by its signal, so that a shell ends a loop around it, too."""
    interrupts: list[int] = []
    atexit.register(_end_by, interrupts)  # registered first, so it is called last
    try:
        main()
    except SystemExit as end:
        if end.code == INTERRUPTED and os.name == "posix":
            interrupts.append(signal.SIGINT)
        raise


def _end_by(signals: list[int]) -> None:
    """End this process by the signal in the list, if there is one."""
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _sentence_of(error: OSError) -> str:
    """Return the message of a system error, with its file."""
    if isinstance(error, SpecbeamError):
        return str(error)
    what = error.strerror or str(error) or type(error).__name__
    named = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' and '.join(named)}: {what}" if named else f"{what}: standard output or another file cannot be used"


def _end(said: str, code: int) -> NoReturn:
    """Print a message on standard error and exit; pending standard output is discarded if it cannot be written."""
    from specbeam.doors.plain import for_terminal

    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):  # otherwise Python would try to flush it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError, ValueError):
        if said:
            print(f"specbeam: {for_terminal(said)}", file=sys.stderr, flush=True)
    sys.exit(code)
