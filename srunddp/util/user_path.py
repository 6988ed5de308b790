"""Expands ``~`` and variables in paths from a configuration, which no shell has expanded."""

import os
import re

from srunddp.errors import ConfigError

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def expanded(path: str | os.PathLike[str], name: str) -> str:
    """Replace ``~`` and variables in a path, as a shell does.

    Args:
        path: For example ``~/runs/$SLURM_JOB_ID``.
        name: The setting or argument that holds the path, for the error message.

    Raises:
        ConfigError: A variable is not set, or there is no such user.
    """
    # expandvars() and expanduser() leave unchanged what they cannot replace. So a variable or a "~"
    # that is still there is an error.
    found = os.path.expanduser(os.path.expandvars(os.fspath(path)))
    if missing := _VARIABLE.search(found):
        raise ConfigError(
            f"{name} is {os.fspath(path)}, and there is no variable {missing[0]}",
            expected="variables that are set on all ranks",
            hint="set it in the job script, or write the path itself",
        )
    if found.startswith("~"):
        raise ConfigError(
            f"{name} is {os.fspath(path)}, and there is no such user",
            expected="~ for your own home, or ~NAME for the home of a user of this node",
            hint="write the absolute path of a folder of this name",
        )
    return found
