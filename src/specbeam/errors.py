"""The errors that users meet; all are `SpecbeamError`s."""

from specbeam.core.errors import *  # noqa: F403
