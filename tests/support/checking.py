"""The type checker of the test run: beartype, with int accepted where float is asked for, as Python's typing has it."""

import os

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def refused(match: str):
    """A wrong value for one of a fixed set of words: under the type checker of the test run, that finds it first."""
    import pytest
    from jaxtyping import TypeCheckError

    import specbeam as sb

    if os.environ.get("SPECBEAM_TYPES") == "off":
        return pytest.raises(sb.SpecbeamError, match=match)
    return pytest.raises((sb.SpecbeamError, TypeCheckError), match=f"{match}|Type-check error")
