"""`python -m specbeam`: the command line where its script is not on the path."""

from specbeam.cli.main import main

main()
