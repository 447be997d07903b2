"""``ckpt completion``: the script that completes ``ckpt``'s command lines."""

from __future__ import annotations

import os
from pathlib import PurePath

import click

from ...completion import INSTALLED, script


@click.command("completion")
@click.argument("shell", required=False, type=click.Choice(list(INSTALLED)))
def completion(shell: str | None) -> None:
    """Print the completion script for your shell.

    \b
    One line installs it:
      bash  eval "$(ckpt completion bash)"    in ~/.bashrc
      zsh   eval "$(ckpt completion zsh)"     in ~/.zshrc
      fish  ckpt completion fish | source     in ~/.config/fish/config.fish

    It completes commands, options, folders, operators and states, and in zsh and fish the ids and
    savepoints after STORE@. Without an argument, the shell is that of the environment variable
    SHELL. Stores that are URLs are not looked at.
    """
    chosen = shell or PurePath(os.environ.get("SHELL", "")).name
    if chosen not in INSTALLED:
        raise click.UsageError(f"name a shell: `ckpt completion {' | '.join(INSTALLED)}`")
    click.echo(script(chosen), nl=False)
