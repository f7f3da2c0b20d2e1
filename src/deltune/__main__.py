"""python -m deltune: the command line."""

from .cli.commands import main

main()
