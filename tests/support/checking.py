"""The type checker of the test run: beartype, with int accepted where float is asked for, as Python's typing has it."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
