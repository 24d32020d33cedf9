"""The subcommands of ``minato`` that need no measured program; ``__main__`` dispatches to them."""
