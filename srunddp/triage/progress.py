"""Whether a run went on after something, or came to a good end; and lines that only quote or warn."""

import re
from collections import deque
from dataclasses import dataclass, field

_STEP = re.compile(
    r"\b(?:step|iter(?:ation)?|epoch|batch|it)s?\b\W{0,4}(\d+)|\b(\d+)/\d+ \[|Epoch \[?(\d+)", re.IGNORECASE
)
# A word of a good end.
FINISHED = re.compile(
    r"\b(?:(?:[Tt]raining|[Rr]un|[Jj]ob|all|evaluation|fit)\b.{0,40}\b(?:finished|completed?|done|ended|stopped)|[Ff]inished|"
    r"[Tt]raining time|[Tt]otal time|exit(?:ed with)? (?:code|status)[ :=]{1,3}0\b|rc[ =]0\b|^\++ exit 0$|DONE|"
    r"\bAll\b.{0,40}\b(?:done|completed)|\b[Dd]one (?:training|in \d)|^[Dd]one\W*$|\b(?:left|ended|stopped) after \d+|"
    r"max_(?:steps|epochs)\S* reached|COMPLETED|[Bb]est (?:acc|model|checkpoint))"
)
# A word of a good end of the run itself, and not of the script that started it.
SUCCEEDED = re.compile(
    r"\b[Tt]raining\b.{0,30}\b(?:finished|completed?|done)\b|[Dd]one training|\bCOMPLETED\b|"
    r"max_(?:steps|epochs)\S* reached|exit(?:ed with)? (?:code|status)[ :=]{1,3}0\b|\brc[ =]0\b|"
    r"[Tt]raining (?:took|time)\b"
)
_RECENT = 256  # ranks of one log tell of the same step
_LEVEL = re.compile(
    r"\[[WID](?:\d|\])|\b[WID]\d{4} \d\d:|(?<!NCCL )\bWARN(?:ING)?\b|\b(?:INFO|DEBUG|TRACE|NOTICE)\b|"
    r"\b(?:warning|info|debug)\]|\[(?:warning|info|debug)\b|\b[WD]arning: |\b\w*Warning: "
)
_HEAD = 90  # characters from the beginning, where loggers put the level; a warning's path may be longer
_PATHS = 300
_DUMP = re.compile(
    r"^\W{0,6}(?!\w*(?:[Ee]rror|[Ee]xception)\b)[A-Za-z_][\w.-]*[\"']?\s{0,30}[=:]\s?[\"']?[^\s\"']{0,80}[\"']?,?$|"
    r"^\W{0,3}(?:Namespace|Config|\w*(?:Args|Arguments|Config))\(|^(?:\w+[:=] ?)?\{['\"]|"
    r"^\s*[\"'][\w.-]+[\"']:\s|^export \w+=|^\+{1,4} |^#|"
    r"^(?:usage|Usage): "
)
_DEBUG = re.compile(r"\b(?:DEBUG|TRACE)\b|\[debug|\bdebug\d?:")
# Whoever wrote it says that it goes on.
HANDLED = re.compile(
    r"\b[Rr]etrying\b|\b[Rr]etry (?:in|after|with|\d)|will (?:be )?re|[Ss]kipp|[Ii]gnor(?:ed|ing)|"
    r"\bfall(?:s|ing)? ?back|[Ff]allback|"
    r"attempt \d+ (?:of|/)|\b(?:try|trying) (?:again|with|another|next)|\b[Cc]ontinuing\b|[Cc]aught and|"
    r"[Rr]ecover(?:ed|ing)\b|[Hh]alving|[Rr]educing (?:the )?(?:micro|batch)|[Nn]on-?(?:fatal|critical)|"
    r"[Bb]est[- ]effort|(?:using|use) .{1,60} instead|carry(?:ing)? on|[Gg]oing on|[Nn]ot fatal|harmless|"
    r"[Rr]estarting (?:the )?(?:data)?(?:loader|worker)s?\b(?! group)"
)


@dataclass
class Progress:
    """How many steps one stream of lines has told of; ``count`` is of unlike ones."""

    count: int = 0
    _recent: deque[tuple[str, ...]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _known: set[tuple[str, ...]] = field(default_factory=set)

    def feed(self, text: str) -> None:
        """Read a line."""
        step = tuple(match[0] for match in _STEP.finditer(text[:400]))
        if not step or step in self._known:
            return
        if len(self._recent) == _RECENT:
            self._known.discard(self._recent[0])
        self._recent.append(step)
        self._known.add(step)
        self.count += 1


def is_below_error(text: str) -> bool:
    """Of a level below error, or something quoted: a configuration, an environment, a shell's trace."""
    match = _LEVEL.search(text, 0, _PATHS)
    return is_quoted(text) or bool(match and (match.start() < _HEAD or match[0].endswith("Warning: ")))


def is_quoted(text: str) -> bool:
    """A configuration, an environment, a shell's trace, or what is only for whoever looks for faults in the program."""
    return bool(_DUMP.match(text) or _DEBUG.search(text, 0, _HEAD))
