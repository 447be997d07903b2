"""What a shell loads: a function that asks ``ckpt`` what may come next.

Values go through the environment and come back as lines; no shell evaluates any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_BASH: Final = r"""
_ckpt_completion() {
    local line first=1
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $first == 1 ]]; then
            first=0
            [[ $line == nospace ]] && compopt -o nospace
        else
            COMPREPLY+=("$line")
        fi
    done < <(_CKPT_COMPLETE=bash COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" \
        COMP_WORDBREAKS="$COMP_WORDBREAKS" command "$1" 2>/dev/null)
}
complete -o nosort -F _ckpt_completion ckpt
"""
_ZSH: Final = r"""
_ckpt_completion() {
    local line value help kind
    local -a spaced spaced_shown open open_shown given
    given=("${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}")
    # What follows a tilde is completed; the tilde stays as it is.
    local home=""
    if [[ $PREFIX == \~/* ]]; then
        compset -P '\~/'
        home="~/"
    fi
    while IFS= read -r line; do
        kind="${line[1]}"
        value="${${line%%$'\t'*}[2,-1]}"
        help="${line#*$'\t'}"
        value="${value#$home}"
        [[ -n $help ]] && help="$value  -- $help" || help="$value"
        if [[ $kind == + ]]; then
            open+=("$value")
            open_shown+=("$help")
        else
            spaced+=("$value")
            spaced_shown+=("$help")
        fi
    done < <(_CKPT_COMPLETE=zsh CKPT_WORDS="${(pj:\x1f:)given}" command "${words[1]}" 2>/dev/null)
    (( $#spaced )) && compadd -l -V ckpt -d spaced_shown -a spaced
    (( $#open )) && compadd -l -V ckpt-open -S '' -d open_shown -a open
    return 0
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _ckpt_completion "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _ckpt_completion ckpt
fi
"""
_FISH: Final = r"""
function __ckpt_completion
    set -l given (commandline --current-process --tokenize --cut-at-cursor)
    set -l current (commandline --current-token --cut-at-cursor | string unescape)
    set -l program $given[1]
    set -e given[1]
    _CKPT_COMPLETE=fish CKPT_WORDS=(string join \x1f -- $given "$current") command $program 2>/dev/null
end
complete --command ckpt --no-files --keep-order --arguments '(__ckpt_completion)'
"""

SHELLS: Final[Mapping[str, str]] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
INSTALLED: Final[Mapping[str, tuple[str, str]]] = {
    "bash": ('eval "$(ckpt completion bash)"', "~/.bashrc"),
    "zsh": ('eval "$(ckpt completion zsh)"', "~/.zshrc"),
    "fish": ("ckpt completion fish | source", "~/.config/fish/config.fish"),
}
"""The one line that installs it, and where that line belongs."""


def script(shell: str) -> str:
    """The script of a shell. Its first line says how to install it."""
    line, file = INSTALLED[shell]
    head = "#compdef ckpt\n" if shell == "zsh" else ""
    return f"{head}# To install: put this line into {file}:  {line}\n{SHELLS[shell].strip()}\n"
