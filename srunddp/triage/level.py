"""How loud a line is: what was only warned of, quoted, or survived by whoever wrote it."""

from __future__ import annotations

import re

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
_HANDLED = re.compile(
    r"\b[Rr]etrying\b|\b[Rr]etry (?:in|after|with|\d)|will (?:be )?re|[Ss]kipp|[Ii]gnor(?:ed|ing)|"
    r"\bfall(?:s|ing)? ?back|[Ff]allback|"
    r"attempt \d+ (?:of|/)|\b(?:try|trying) (?:again|with|another|next)|\b[Cc]ontinuing\b|[Cc]aught and|"
    r"[Rr]ecover(?:ed|ing)\b|[Hh]alving|[Rr]educing (?:the )?(?:micro|batch)|[Nn]on-?(?:fatal|critical)|"
    r"[Bb]est[- ]effort|(?:using|use) .{1,60} instead|carry(?:ing)? on|[Gg]oing on|[Nn]ot fatal|harmless|"
    r"[Rr]estarting (?:the )?(?:data)?(?:loader|worker)s?\b(?! group)"
)


def is_quiet(text: str) -> bool:
    """Of a level below error, or something quoted: a configuration, an environment, a shell's trace."""
    match = _LEVEL.search(text, 0, _PATHS)
    if match and (match.start() < _HEAD or match[0].endswith("Warning: ")):
        return True
    return is_quoted(text)


def is_quoted(text: str) -> bool:
    """A configuration, an environment, a shell's trace, or what is only for whoever looks for faults in the program."""
    return bool(_DUMP.match(text) or _DEBUG.search(text, 0, _HEAD))


def is_handled(text: str) -> bool:
    """Whoever wrote it says that it goes on."""
    return bool(_HANDLED.search(text))
