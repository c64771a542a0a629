"""Commands as functions of one record: its attributes are the arguments and options of the command line.

A group is an attribute of several options, whose values it gets as a dictionary: so the
options of generation are the same in all commands (`generation`), and there is one place where they are listed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from specbeam.doors.options.table import OPTIONS, GenerationOption, kind_of

OF_COMMANDS = "Further options of generation"  # the panel of options without a text of their own
_SIMPLE = {bool, int, float, str}


class Record:
    """The arguments of a command: attributes with the types that typer reads. A value in the class is a default.

    Not a dataclass: making sixty of them would take longer than all else of `--help`.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@dataclass(frozen=True)
class Group:
    """Options of the command line whose values are kept together.

    Args:
        parameters: of the command, in their order.
        collect: makes the value of the attribute from theirs, by name.
    """

    parameters: tuple[Parameter, ...]
    collect: Callable[[dict[str, Any]], Any] = dict

    def __get__(self, record: "Record | None", kind: type) -> Any:
        """Return the group itself from a class, and what is collected of nothing given from a record."""
        if record is None:
            return self
        return self.collect({parameter.name: parameter.default for parameter in self.parameters})


def group(parameters: Mapping[str, Parameter], collect: Callable[[dict[str, Any]], Any] = dict) -> Any:
    """Return the value in its class of an attribute that is a group of options."""
    return Group(tuple(parameters.values()), collect)


def generation(without: Sequence[str] = (), only: Sequence[str] | None = None, **defaults: Any) -> Any:
    """Return the group of the options of generation that are given, by the names of `specbeam.generate`.

    Args:
        without: options that the command does not have.
        only: the options that it has; None: all with a flag.
        defaults: of the command, where they are not those of the options.
    """
    chosen = [option for name, option in OPTIONS.items() if option.flag is not None and name not in without]
    if only is not None:
        chosen = [option for option in chosen if option.name in only]
    return group({option.name: parameter_of(option, defaults) for option in chosen}, _given)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, where they are not the usual ones."""
    return {name: value for name, value in values.items() if value != OPTIONS[name].default and value != []}


def parameter_of(option: GenerationOption, defaults: Mapping[str, Any] = MappingProxyType({})) -> Parameter:
    """Return the flag of an option."""
    flag = option.flag
    assert flag is not None
    default = defaults.get(option.name, option.default)
    kind = flag.kind or _simple(kind_of(option), default)
    if kind == list[str]:
        default = []
    names = [f"--{flag.name}"] if flag.name else []
    panel = None if flag.help else OF_COMMANDS
    about = typer.Option(*names, help=flag.help or option.meaning, rich_help_panel=panel)
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about])


def _simple(kind: Any, default: Any) -> Any:
    """Return the type of an option on the command line: the one of its types that a word can be read as."""
    found = next(one for one in (kind, *get_args(kind)) if one in _SIMPLE)
    return found if default is not None else found | None


def add_command(app: typer.Typer, run: Callable[[Any], int], name: str | None = None, **about: Any) -> None:
    """Add a command to an app, with the docstring of its function as its help.

    Args:
        run: takes the record of the arguments as `given`, and returns the exit code.
        name: of the command; None: that of the function.
        about: further arguments of `typer.Typer.command`.
    """
    record = get_type_hints(run)["given"]

    def command(**values: Any) -> None:
        raise typer.Exit(run(record_of(record, values)))

    command.__doc__ = run.__doc__
    command.__signature__ = Signature(parameters_of(record))  # type: ignore[attr-defined]
    app.command(name or run.__name__.replace("_", "-"), **about)(command)


def parameters_of(record: type[Record]) -> list[Parameter]:
    """Return the parameters of a command whose arguments are the attributes of a record."""
    found: list[Parameter] = []
    for name, kind in get_type_hints(record, include_extras=True).items():
        default = getattr(record, name, Parameter.empty)
        if isinstance(default, Group):
            found += default.parameters
        else:
            found.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return found


def record_of(record: type[Record], values: Mapping[str, Any]) -> Record:
    """Return the record with the values of the parameters of its command."""
    found: dict[str, Any] = {}
    for name in get_type_hints(record):
        default = getattr(record, name, None)
        if isinstance(default, Group):
            found[name] = default.collect({parameter.name: values[parameter.name] for parameter in default.parameters})
        else:
            found[name] = values[name]
    return record(**found)
