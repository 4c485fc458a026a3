"""Print a script that completes commands, options and names in a shell.

Print the completion script of SHELL. It completes commands, options, choices, scales, residual methods, config keys,
tasks and files.
"""

import argparse
import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dualres.config.loading import names
from dualres.config.schema import Config

# A shell completes file names itself where nothing is printed.
BASH = """\
_dualres() {
  local IFS=$'\\n'
  COMPREPLY=($("$1" completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
  if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
}
complete -o default -F _dualres dualres
"""
ZSH = """\
_dualres() {
  local -a found=("${(@f)$("$words[1]" completion zsh -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ -z $found[1] ]]; then _files; elif [[ $found[1] == *= ]]; then compadd -S '' -a found; else compadd -a found; fi
}
compdef _dualres dualres
"""
FISH = """\
function __dualres
    set -l line (commandline -opc)
    set -l found ($line[1] completion fish -- $line[2..-1] (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        string join \\n $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c dualres -f -a '(__dualres)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
EPILOG = """\
to install it, once:
  echo 'eval "$(dualres completion bash)"' >> ~/.bashrc
  echo 'eval "$(dualres completion zsh)"' >> ~/.zshrc        (below compinit)
  dualres completion fish > ~/.config/fish/completions/dualres.fish
"""
LISTS = ("residuals", "zero_shot")  # arguments that take names separated by commas
ParserMap = Mapping[str, argparse.ArgumentParser]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SCRIPTS, help=", ".join(SCRIPTS))
    parser.add_argument("words", metavar="WORD", nargs="*", help="used by the script: print what completes these words")


def run(args: argparse.Namespace) -> int:
    if args.words:
        parser, commands = args.make_parser()
        for word in completions(parser, commands, args.words):
            print(word)
    else:
        print(SCRIPTS[args.shell], end="")
    return 0


def completions(parser: argparse.ArgumentParser, commands: ParserMap, words: Sequence[str]) -> list[str]:
    """What may replace the last word of a command line; nothing where it is a file or free text."""
    *before, word = [word for word in words if word != "="] + ([""] if words[-1] == "=" else [])  # bash splits there
    name = next((word for word in before if not word.startswith("-")), None)
    if name is None:
        found = [*(_options(parser) if word.startswith("-") else commands)]
    elif name in commands:
        action = _expected(commands[name], before[before.index(name) + 1 :])
        if word.startswith("-") and (action is None or not action.option_strings):
            found = [*_options(commands[name])]
        else:
            found = [] if action is None else _values(action, name, word)
    else:
        found = []
    return [candidate for candidate in found if candidate.startswith(word)]


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {option: action for action in parser._actions for option in action.option_strings}


def _expected(command: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Action | None:
    """The argument of the word after `words`: the value of an option, or the next positional."""
    positionals = [action for action in command._actions if not action.option_strings]
    options, given, value_of = _options(command), 0, None
    for word in words:
        if value_of is None and word in options:
            value_of = options[word] if options[word].nargs != 0 else None
        else:
            given += value_of is None and not word.startswith("-")
            value_of = None
    return positionals[given] if value_of is None and given < len(positionals) else value_of


def _values(action: argparse.Action, command: str, word: str) -> list[str]:
    """The known values of an argument, as what may replace `word`."""
    known = NAMES.get(action.dest, lambda: action.choices or ())
    presets = _presets() if (command, action.dest) == ("suite", "scale") else ()
    written = word[: word.rfind(",") + 1] if action.dest in LISTS else ""
    return [f"{written}{name}" for name in (*known(), *presets)]


def _presets() -> Iterable[str]:
    from dualres.config.paper import PRESETS

    return PRESETS


def _tasks() -> Iterable[str]:
    from dualres.evaluate.tasks import TASKS

    return (task.name for task in TASKS)


def _keys(section: type, where: str = "") -> Iterator[str]:
    """Every key of a config: train.parallel.tensor."""
    for name, hint in typing.get_type_hints(section).items():
        inner = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
        if inner:
            yield from _keys(typing.cast(type, inner[0]), f"{where}{name}.")
        elif name != "options":  # of a residual method
            yield f"{where}{name}"


NAMES: dict[str, Callable[[], Iterable[object]]] = {  # of arguments without choices
    "scale": lambda: names("scale"),
    "stand_in": lambda: names("scale"),
    "residual": lambda: names("residual"),
    "residuals": lambda: names("residual"),
    "set": lambda: (f"{key}=" for key in _keys(Config)),
    "zero_shot": _tasks,
}
