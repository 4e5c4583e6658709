"""The command line by `python -m lenspipe.cli`."""

from lenspipe.cli import main

main()
