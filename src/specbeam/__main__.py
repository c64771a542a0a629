"""The command line as `python -m specbeam`, for environments in which its script is not on the path."""

from specbeam.doors.cli.main import main

main()
