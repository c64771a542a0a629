"""The command line as `python -m specbeam`, for environments without its script on the path."""

from specbeam.doors.cli.main import program

program()
