"""python -m deltune: the command line."""

from .cli import main

main()
