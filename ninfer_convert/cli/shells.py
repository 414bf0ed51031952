"""The shells that complete: the script of each, how it tells what was typed, and how it is told candidates.

A candidate that ends in `/` or `=` is only the beginning of a word; no space is put behind it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from click.shell_completion import CompletionItem, ShellComplete, add_completion_class, split_arg_string

HELP_LENGTH = 70
"""Characters of what is said about a candidate."""

_BASH = r"""# ninfer-convert: completion for bash 4.4 or later
_ninfer_convert_completion() {
    local IFS=$'\n' line lines
    COMPREPLY=()
    mapfile -t lines < <(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \
        _NINFER_CONVERT_COMPLETE=bash_complete "$1" 2>/dev/null)
    for line in "${lines[@]}"; do
        case $line in
            file) compopt -o default ;;
            dir) compopt -o dirnames ;;
            plain*) COMPREPLY+=("${line#plain }") ;;
        esac
    done
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[/=] ]]; then
        compopt -o nospace
    fi
}
complete -o nosort -F _ninfer_convert_completion ninfer-convert
"""

_ZSH = r"""#compdef ninfer-convert
# ninfer-convert: completion for zsh
_ninfer_convert_completion() {
    local -a whole whole_texts parts part_texts fields
    local line text
    for line in "${(@f)$(env COMP_WORDS="${(F)words}" COMP_CWORD=$((CURRENT - 1)) \
        _NINFER_CONVERT_COMPLETE=zsh_complete $words[1] 2>/dev/null)}"; do
        fields=("${(@ps:\t:)line}")
        case $fields[1] in
            dir|file)
                # what stands before the path, such as NAME=
                (( $#fields > 1 )) && compset -P "${(b)fields[2]}"
                [[ $fields[1] == dir ]] && _files -/ || _files
                ;;
            plain)
                text=$fields[2]
                [[ -n $fields[3] ]] && text="$fields[2]  -- $fields[3]"
                if [[ $fields[2] == *[/=] ]]; then
                    parts+=("$fields[2]")
                    part_texts+=("$text")
                else
                    whole+=("$fields[2]")
                    whole_texts+=("$text")
                fi
                ;;
        esac
    done
    (( $#parts )) && compadd -l -S '' -V parts -d part_texts -a parts
    (( $#whole )) && compadd -l -V names -d whole_texts -a whole
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _ninfer_convert_completion "$@"
else
    compdef _ninfer_convert_completion ninfer-convert
fi
"""

_FISH = r"""# ninfer-convert: completion for fish
function __ninfer_convert_completion
    for line in (env COMP_WORDS=(commandline -cp | string collect) COMP_CWORD=(commandline -ct | string collect) \
            _NINFER_CONVERT_COMPLETE=fish_complete ninfer-convert 2>/dev/null)
        set -l fields (string split \t -- $line)
        switch $fields[1]
            case dir file
                # $fields[2] is what stands before the path, such as NAME=
                set -l paths (__fish_complete_path $fields[3])
                test $fields[1] = dir; and set paths (__fish_complete_directories $fields[3])
                for path in $paths
                    echo $fields[2]$path
                end
            case plain
                string join \t -- $fields[2..]
        end
    end
end
complete --command ninfer-convert --no-files --arguments "(__ninfer_convert_completion)"
"""


class _Shell(ShellComplete):
    """What the shells have in common: words as they are typed, the one that is completed among them."""

    _option = ""
    """`--option=` in front of the value that is completed, in one word with it."""

    def source(self) -> str:
        return self.source_template

    def get_completion_args(self) -> tuple[list[str], str]:
        before, word = self.typed()
        if found := re.match(r"--[\w-]+=", word):
            self._option, word = found[0], word[found.end() :]
            before.append(self._option[:-1])
        return before, word

    def typed(self) -> tuple[list[str], str]:
        """Returns the words behind the command and before the one that is completed, and that one."""
        words, number = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
        plain = [*map(_plain, words), ""]
        return plain[1:number], plain[min(number, len(words))]


class _Bash(_Shell):
    """bash breaks words at `=` and `:` outside of quotes, and replaces only what follows the last of them."""

    name = "bash"
    source_template = _BASH
    _kept = 0
    _is_quoted = False

    def typed(self) -> tuple[list[str], str]:
        words, number = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
        whole: list[str] = []
        is_glued = False
        for word in [*words, ""][: number + 1]:
            is_break = re.fullmatch("[=:]+", word) is not None
            if not whole or not word or not (is_break or is_glued):
                whole.append("")
            self._kept = len(whole[-1]) + (len(word) if is_break else 0)
            self._is_quoted = word.startswith(("'", '"'))
            whole[-1] += _plain(word)
            is_glued = is_break
        return whole[1:-1], whole[-1]

    def format_completion(self, item: CompletionItem) -> str:
        if item.type != "plain":
            return item.type
        value = f"{self._option}{item.value}"[self._kept :]
        return "plain " + (value if self._is_quoted else re.sub(r"([^\w@%+=:,./~-])", r"\\\1", value))


class _Zsh(_Shell):
    """zsh quotes what it inserts in place of the whole word."""

    name = "zsh"
    source_template = _ZSH

    def format_completion(self, item: CompletionItem) -> str:
        if item.type != "plain":
            return f"{item.type}\t{self._option}{_before_path(item)}"
        return f"plain\t{self._option}{item.value}\t{_help(item)}"


class _Fish(_Shell):
    """fish tells the line up to the cursor, and quotes what it inserts in place of the whole word."""

    name = "fish"
    source_template = _FISH

    def typed(self) -> tuple[list[str], str]:
        words, word = split_arg_string(os.environ["COMP_WORDS"]), os.environ["COMP_CWORD"].rstrip("\n")
        return (words[1:-1] if word else words[1:]), _plain(word)

    def format_completion(self, item: CompletionItem) -> str:
        if item.type != "plain":
            return f"{item.type}\t{self._option}{_before_path(item)}\t{item.value or ''}"
        return f"plain\t{self._option}{item.value}\t{_help(item)}".rstrip("\t")


SHELLS: Mapping[str, type[ShellComplete]] = {shell.name: shell for shell in (_Bash, _Zsh, _Fish)}


def add_shells() -> None:
    """Makes click answer these scripts, in place of its own."""
    for shell in SHELLS.values():
        add_completion_class(shell)


def _plain(word: str) -> str:
    """Returns what a word means that is typed perhaps in part: without quotes and backslashes."""
    return "".join(split_arg_string(word))


def _before_path(item: CompletionItem) -> str:
    """Returns the beginning of the word that is no part of the path to be completed."""
    return getattr(item, "before", None) or ""


def _help(item: CompletionItem) -> str:
    """Returns the first sentence about a candidate, on one line."""
    text = re.split(r"[.;](?:\s|$)|  \[", item.help or "", maxsplit=1)[0]
    text = " ".join(text.split())
    return text if len(text) <= HELP_LENGTH else text[: HELP_LENGTH - 3] + "..."
