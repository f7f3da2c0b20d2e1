"""The command `deltune`: its entry point, with the subcommands in the files beside it."""

from .app import main as main
