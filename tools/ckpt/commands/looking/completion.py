"""``ckpt completion``: the script that completes ``ckpt``'s command lines."""

from __future__ import annotations

import os
from pathlib import PurePath

import click

from ...completion import INSTALLED, SHELLS, script


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(list(SHELLS)))
def completion(shell: str | None) -> None:
    """Print what makes your shell complete command lines.

    \b
    One line installs it:
      bash  eval "$(ckpt completion bash)"    in ~/.bashrc
      zsh   eval "$(ckpt completion zsh)"     in ~/.zshrc
      fish  ckpt completion fish | source     in ~/.config/fish/config.fish

    It completes commands and options, stores, ids, operators, states, columns and files. Without
    SHELL, that of the environment variable SHELL. Behind STORE@ the ids come newest first,
    with their times, then names of savepoints. Folders that hold checkpoints come before others.
    Of stores that are URLs nothing is completed: only local files are looked at, for two seconds at
    most.
    """
    chosen = shell or PurePath(os.environ.get("SHELL", "")).name
    if chosen not in INSTALLED:
        raise click.UsageError(f"name a shell: `ckpt completion {' | '.join(SHELLS)}`")
    click.echo(script(chosen), nl=False)
