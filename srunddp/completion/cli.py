"""Provides ``srunddp completion``. It adapts click's completion scripts so that they also complete
the value in ``--option=value``.
"""

import re

import click
from click import shell_completion as shells

from srunddp.util.click_types import COMPLETE


class _Words(shells.ShellComplete):
    """Rejoins the words that bash splits at ``=`` and ``:``.

    An option without a command before it is completed as an option of ``run``.
    """

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the word to complete, and the word to complete."""
        words, last = super().get_completion_args()
        # Bash splits --port=4 into three words, at the letters of COMP_WORDBREAKS. No word contains
        # a line end, so this joins and splits the words by line ends.
        *words, last = re.sub(r"\n([=:])\n", r"\1", "\n".join([*words, last])).split("\n")
        self.start = ""
        if last.startswith("-"):
            self.start = last[: last.find("=") + 1]
            # Without a command, click would look for the option in the group, which does not have
            # the options of run.
            if not words:
                words = ["run"]
        return words, last


@shells.add_completion_class
class _Bash(_Words, shells.BashComplete):
    pass


@shells.add_completion_class
class _Zsh(_Words, shells.ZshComplete):
    # Without -U, zsh keeps the text before "=".
    source_template = shells.ZshComplete.source_template.replace("compadd -U", "compadd")
    source_template = source_template.replace("() {\n", "() {\n    compset -P 1 '--*='\n", 1)


@shells.add_completion_class
class _Fish(_Words, shells.FishComplete):
    source_template = shells.FishComplete.source_template.replace(
        "__fish_complete_path ", "complete -C \"'' \""
    )

    def format_completion(self, item: shells.CompletionItem[str]) -> str:
        """Return the line that passes one proposal to fish."""
        item.value = self.start + item.value  # fish replaces the whole word
        return super().format_completion(item)


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")), metavar="bash|zsh|fish")
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script for tab completion of srunddp's command lines. Bash must be 4.4 or newer.

    \b
    eval "$(srunddp completion bash)"       # in ~/.bashrc
    eval "$(srunddp completion zsh)"        # in ~/.zshrc, after compinit
    srunddp completion fish > ~/.config/fish/completions/srunddp.fish
    """
    shells.shell_complete(context.find_root().command, {}, "srunddp", COMPLETE, f"{shell}_source")
