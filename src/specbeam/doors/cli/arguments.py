"""Commands as functions of one record: its fields are the arguments and options of the command line.

A field has the type that typer reads. A group is a field of several options, whose values it gets as a dictionary: so the
options of generation are the same in all commands (`generation`), and there is one place where they are listed.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from specbeam.doors.options.table import OPTIONS, Option, kind_of

Record = TypeVar("Record")
OF_COMMANDS = "Further options of generation"  # the panel of options without a text of their own
_SIMPLE = {bool, int, float, str}


@dataclass(frozen=True)
class Group:
    """Options of the command line whose values are kept together.

    Args:
        parameters: of the command, in their order.
        collect: makes the value of the field from theirs, by name.
    """

    parameters: tuple[Parameter, ...]
    collect: Callable[[dict[str, Any]], Any] = dict


def group(parameters: Mapping[str, Parameter], collect: Callable[[dict[str, Any]], Any] = dict) -> Any:
    """Return a field of a record that is a group of options."""
    return field(metadata={"group": Group(tuple(parameters.values()), collect)})


def generation(*only: str, **defaults: Any) -> Any:
    """Return a field with the options of generation that are given, by the names of `specbeam.generate`.

    Args:
        only: names of the options that the command has; none: all with a flag.
        defaults: of the command, where they are not those of the options.
    """
    chosen = [option for name, option in OPTIONS.items() if option.flag is not None and (not only or name in only)]
    if only:
        chosen.sort(key=lambda option: only.index(option.name))
    return group({option.name: _parameter_of(option, defaults) for option in chosen}, _given)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in values.items() if value is not None and value != []}


def _parameter_of(option: Option, defaults: Mapping[str, Any]) -> Parameter:
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


def parameters_of(record: type) -> list[Parameter]:
    """Return the parameters of a command whose arguments are the fields of a record."""
    kinds = get_type_hints(record, include_extras=True)
    found: list[Parameter] = []
    for one in fields(record):
        known: Group | None = one.metadata.get("group")
        if known is not None:
            found += known.parameters
            continue
        found.append(Parameter(one.name, Parameter.KEYWORD_ONLY, default=_default(one), annotation=kinds[one.name]))
    return found


def _default(one: "Field[Any]") -> Any:
    """Return the default of a field, or what stands for none in a signature."""
    if one.default_factory is not MISSING:
        return one.default_factory()
    return Parameter.empty if one.default is MISSING else one.default


def record_of(record: type[Record], values: Mapping[str, Any]) -> Record:
    """Return the record with the values of the parameters of its command."""
    found: dict[str, Any] = {}
    for one in fields(record):  # type: ignore[arg-type]
        known: Group | None = one.metadata.get("group")
        if known is None:
            found[one.name] = values[one.name]
        else:
            found[one.name] = known.collect({parameter.name: values[parameter.name] for parameter in known.parameters})
    return record(**found)
