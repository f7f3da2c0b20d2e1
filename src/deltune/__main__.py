"""python -m deltune: the command line."""

from .cli.app import main

main()
