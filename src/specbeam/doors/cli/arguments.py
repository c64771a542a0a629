"""Commands as functions of a record whose attributes are the arguments and options of the command line.

A group is an attribute for several options; its value is a dictionary. The group `generation` gives all
commands the same options of generation, from `options.table`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from specbeam.doors.cli.common import check_options, with_files
from specbeam.doors.options.table import OPTIONS, GenerationOption, kind_of

# Panels of `--help`: the most used options of generation, and all others.
COMMON = "Generation (defaults: the model's generation config)"
FURTHER = "More options of generation (defaults: as above)"
WHOLE = 10_000  # characters: more than any sentence has
_SIMPLE = {bool, int, float, str}
Made = TypeVar("Made")


class Record:
    """The arguments of a command: attributes with types for typer and, as values of the class, their defaults.

    Not a dataclass: making sixty of them would take most of the time of `--help`.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def named(self, *names: str) -> dict[str, Any]:
        """Return the values of some attributes by name."""
        return {name: getattr(self, name) for name in names}

    def make(self, kind: type[Made], **others: Any) -> Made:
        """Make a dataclass from the attributes with the names of its fields, and from other values."""
        names = {field.name for field in fields(kind)} - others.keys()  # type: ignore[arg-type]
        own = self.named(*(name for name in names if hasattr(self, name)))
        return kind(**own, **others)


@dataclass(frozen=True)
class Group:
    """Options of the command line that form one attribute of a record.

    Args:
        parameters: the parameters of the command, in order.
        collect: makes the value of the attribute from the parameters' values by name.
    """

    parameters: tuple[Parameter, ...]
    collect: Callable[[dict[str, Any]], Any] = dict

    def __get__(self, record: "Record | None", kind: type) -> Any:
        """Return the group itself from a class, and the value of its defaults from a record."""
        if record is None:
            return self
        return self.collect({one.name: one.default for one in self.parameters})


def group(parameters: Iterable[Parameter], collect: Callable[[dict[str, Any]], Any] = dict) -> Any:
    """Return the default of an attribute that is a group of options."""
    return Group(tuple(parameters), collect)


def parameter(name: str, annotation: Any, default: Any = None) -> Parameter:
    """Return a parameter of a command."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def generation(without: Sequence[str] = (), **defaults: Any) -> Any:
    """Return the group of the options of generation with a flag, by the names of `specbeam.generate`.

    Args:
        without: options to leave out.
        defaults: defaults of the command that differ from those of the options.
    """
    chosen = [option for name, option in OPTIONS.items() if option.flag is not None and name not in without]
    return group([parameter_of(option, defaults) for option in chosen], given_options)


def given_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of generation that differ from their defaults, with the content of files.

    Raises an error for an option that is wrong for every model, before a command imports torch.
    """
    found = {name: value for name, value in values.items() if value != OPTIONS[name].default and value != []}
    check_options(found)
    return with_files(found)


def parameter_of(
    option: GenerationOption, defaults: Mapping[str, Any] = MappingProxyType({}), panel: str | None = None
) -> Parameter:
    """Return the flag of an option.

    Args:
        defaults: defaults of the command by option.
        panel: the panel of `--help`; None: by whether the option is a common one.
    """
    flag = option.flag
    assert flag is not None
    default = defaults.get(option.name, option.default)
    kind = flag.kind or _simple(kind_of(option), default)
    if kind == list[str]:
        default = []
    own = f"--{option.name.replace('_', '-')}"
    names = list(dict.fromkeys([f"--{flag.name}", own])) if flag.name else []
    panel = panel or (COMMON if flag.is_common else FURTHER)
    help = flag.help or option.meaning
    if option.name in defaults:
        help = help.partition(" Not set:")[0]
    about = typer.Option(*names, help=help, rich_help_panel=panel)
    return parameter(option.name, Annotated[kind, about], default)


def _simple(kind: Any, default: Any) -> Any:
    """Return the type of an option on the command line: the first of its types that can be written as a word."""
    found = next(one for one in (kind, *get_args(kind)) if one in _SIMPLE)
    return found if default is not None else found | None


def add_command(app: typer.Typer, run: Callable[[Any], int], name: str | None = None, **about: Any) -> None:
    """Add a command to an app; its help is the docstring of its function.

    Args:
        run: takes the record of arguments as `given`, and returns the exit code.
        name: name of the command; None: that of the function.
        about: further arguments of `typer.Typer.command`.
    """
    record = get_type_hints(run)["given"]

    def command(**values: Any) -> None:
        raise typer.Exit(run(record_of(record, values)))

    command.__doc__ = run.__doc__
    command.__signature__ = Signature(parameters_of(record))  # type: ignore[attr-defined]
    app.command(name or run.__name__.replace("_", "-"), cls=PlainCommand, **about)(command)


class PlainCommand(TyperCommand):
    """A command with its help as plain text, in which no terminal is too narrow for the name of an option."""

    def format_options(self, context: Any, formatter: Any) -> None:
        """Write the arguments and options, a section per panel."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for one in self.get_params(context):
            usual = "Arguments" if one.param_type_name == "argument" else "Options"
            panel = getattr(one, "rich_help_panel", None) or usual
            line = one.get_help_record(context)
            if line is not None:
                panels.setdefault(panel, []).append(line)
        for panel, lines in panels.items():
            if lines:
                with formatter.section(panel):
                    formatter.write_dl(lines)


class PlainGroup(TyperGroup):
    """A group of commands with its help as plain text."""

    def format_commands(self, context: Any, formatter: Any) -> None:
        """Write the commands, each with the first sentence of its help."""
        commands = [command for command in self.commands.values() if not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl([(command.name, command.get_short_help_str(limit=WHOLE)) for command in commands])


def command_group(help: str, cls: type[PlainGroup] = PlainGroup, **about: Any) -> typer.Typer:
    """Return an empty group of commands, with its help as plain text.

    Args:
        about: further arguments of `typer.Typer`.
    """
    settings = {"help_option_names": ["--help", "-h"], "max_content_width": 120}
    return typer.Typer(
        cls=cls, no_args_is_help=True, help=help, rich_markup_mode=None, context_settings=settings, **about
    )


def parameters_of(record: type[Record]) -> list[Parameter]:
    """Return the parameters of a command whose arguments are the attributes of a record."""
    found: list[Parameter] = []
    for name, kind in get_type_hints(record, include_extras=True).items():
        default = getattr(record, name, Parameter.empty)
        if isinstance(default, Group):
            found += default.parameters
        else:
            found.append(parameter(name, kind, default))
    return found


def record_of(record: type[Record], values: Mapping[str, Any]) -> Record:
    """Return the record with the values of the parameters of its command."""
    found: dict[str, Any] = {}
    for name in get_type_hints(record):
        default = getattr(record, name, None)
        if isinstance(default, Group):
            found[name] = default.collect({one.name: values[one.name] for one in default.parameters})
        else:
            found[name] = values[name]
    return record(**found)
