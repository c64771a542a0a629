"""Unknown names, and the known ones that were probably meant."""

import difflib
from collections.abc import Iterable, Mapping

# Settings of methods by their names in transformers, vLLM and papers.
SETTINGS_ELSEWHERE = {
    "num_beams": "beams",
    "beam_width": "beams",
    "beam_size": "beams",
    "num_assistant_tokens": "depth",
    "num_speculative_tokens": "depth",
    "gamma": "depth",
    "draft_tokens": "depth",
}


def nearest(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """Return the known name most similar to an unknown one; "" if none is similar.

    Args:
        aliases: known names by their names in other libraries.
    """
    names = [*known]
    meant = (aliases or {}).get(name, "")
    if meant in names:
        return meant
    near = difflib.get_close_matches(name, names, 1)
    if near:
        return near[0]
    longer = [one for one in names if len(name) > 2 and one.startswith(f"{name}_")]
    return longer[0] if longer else ""


def hint(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """Return " (did you mean ...?)" for a message about an unknown name, or ""; see `nearest`."""
    meant = nearest(name, known, aliases)
    return f" (did you mean {meant}?)" if meant else ""
