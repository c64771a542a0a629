"""The errors raised for users; all are `SpecbeamError`s."""

from specbeam.core.errors import *  # noqa: F403
