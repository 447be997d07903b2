"""``ckpt completion``: the script that completes ``ckpt``'s command lines."""

from __future__ import annotations

import os
from pathlib import PurePath

import click

from ...completion import INSTALLED, SHELLS, script


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(list(SHELLS)))
def completion(shell: str | None) -> None:
    """Print the completion script for your shell.

    \b
    One line installs it:
      bash  eval "$(ckpt completion bash)"    in ~/.bashrc
      zsh   eval "$(ckpt completion zsh)"     in ~/.zshrc
      fish  ckpt completion fish | source     in ~/.config/fish/config.fish

    It completes commands and options, stores, ids, operators, states, columns and files. Without an
    argument, the shell is that of the environment variable SHELL. After STORE@ come the ids with
    their times, newest first, then names of savepoints. Folders that hold checkpoints come before
    others. Stores that are URLs are not completed: only local files are read, for two seconds at
    most.
    """
    chosen = shell or PurePath(os.environ.get("SHELL", "")).name
    if chosen not in INSTALLED:
        raise click.UsageError(f"name a shell: `ckpt completion {' | '.join(SHELLS)}`")
    click.echo(script(chosen), nl=False)
