"""Errors for keyword arguments that a function of the door does not have, with the names that were probably meant."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from typing import Any

from specbeam.core.errors import BadSetting
from specbeam.core.names import hint
from specbeam.doors.method_names import setting_meant
from specbeam.doors.options.generation_config import ADVICE
from specbeam.doors.options.table import OPTIONS, aliases

# Arguments of other libraries that specbeam takes elsewhere.
_ELSEWHERE: Mapping[str, str] = {
    "assistant_model": "give sb.load(target, draft=...)",
    "draft": "give sb.load(target, draft=...)",
    "model": "the first argument is the pair that sb.load returns",
    "tokenizer": "give sb.load(target, tokenizer=...)",
    "device": "give sb.load(target, device=...)",
    "return_dict_in_generate": "answers have text, tokens, beams and report",
    "word_timestamps": "times of single words are not supported; segments have times",
    "max_words_per_line": "times of single words are not supported",
    "vad_filter": "voice activity detection is not supported",
    "vad_parameters": "voice activity detection is not supported",
}


def check_names(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    methods: Sequence[str] = (),
    without: Sequence[str] = (),
    further: Sequence[str] = (),
) -> None:
    """Raise `BadSetting`, with advice for each name, if a function has no such keyword arguments.

    Args:
        function: a function with the options of generation.
        given: its keyword arguments.
        methods: recipes whose settings are suggested, the preferred ones first; empty: the function takes no method.
        without: options of generation that the function has not.
        further: options of the function that its signature does not name.
    """
    own = (*_own_names(function), *further)
    unknown = sorted(name for name in given if name not in own and (name in without or name not in OPTIONS))
    if not unknown:
        return
    known = [*own, *(name for name in OPTIONS if name not in without)]
    found = {name: _advice(name, given, known, methods) for name in unknown}
    listed = "; ".join(f"{name}{advice}" for name, advice in found.items())
    rest = "" if all(found.values()) else f"; it has {', '.join(known)}"
    raise BadSetting(f"{function.__name__}() has no option {listed}{rest}")


@cache
def _own_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters, except the first and `**options`."""
    parameters = list(signature(function).parameters.values())
    return tuple(one.name for one in parameters[1:] if one.kind is not Parameter.VAR_KEYWORD)


def _advice(name: str, given: Mapping[str, Any], known: Sequence[str], methods: Sequence[str]) -> str:
    """Return what to give in place of an unknown option, as the continuation of its name; "" if nothing is known."""
    if name in ADVICE or name in _ELSEWHERE:
        return f": {ADVICE.get(name) or _ELSEWHERE[name]}"
    if methods and name == "do_sample":
        if given[name] is False or given[name] == 0:
            return ": methods decide that; greedy, beam_search and speculative_beam_search draw nothing"
        return ": methods sample, unless their name says greedy or search; leave it out"
    searches = ("speculative_beam_search", "beam_search")
    preferred = searches if given.get("do_sample") is False and not set(searches) & set(methods) else methods
    method, setting = setting_meant(name, preferred) if methods else ("", "")
    if method:
        value = repr(given[name]) if isinstance(given[name], (int, float)) else "..."
        return f", but methods have {setting}: give method=sb.{method}({setting}={value})"
    return hint(name, known, aliases())
