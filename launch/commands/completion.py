"""`myxa completion`: commands and flags for bash and zsh, from the parser itself."""

from __future__ import annotations

import argparse

from .parser import Command, Parser

SCRIPT = """\
{zsh}_myxa() {{
  local words=""
  case "${{COMP_WORDS[1]}}:$COMP_CWORD" in
    *:1) words="{commands}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$2"))
  [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$2"))
}}
complete -F _myxa myxa
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def _add(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help='in ~/.bashrc: eval "$(myxa completion bash)"')


def _completion(options: argparse.Namespace) -> int:
    print(script(options.parser, options.shell), end="")
    return 0


def script(parser: Parser, shell: str) -> str:
    cases = "\n".join(f'    {name}:*) words="{" ".join(each.flags)}" ;;' for name, each in parser.commands.items())
    return SCRIPT.format(zsh=ZSH if shell == "zsh" else "", commands=" ".join(parser.commands), cases=cases)


COMPLETION = Command("completion", "commands and flags for bash or zsh to complete", _completion, _add)
