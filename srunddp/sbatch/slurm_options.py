"""The options of sbatch that srunddp passes on: their names and letters, and whether they take a
value.
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from srunddp.errors import UsageError
from srunddp.util.usage_errors import foreign

# Of Slurm 22.05 to 26.05, as LETTER:NAME. "=" takes a value, "?" may take one, and "!" is not of
# salloc's. What is not here is SlurmJob's (as --nodes), or of no use in a job script (as --wrap).
# -m is --module here, --distribution there.
_TABLE = """
A:account= acctg-freq= a:array=! batch=! bb= bbf= b:begin= D:chdir= cluster= cluster-constraint=
M:clusters= comment= consolidate-segments C:constraint= container-id= container-type= context=
contiguous S:core-spec= cores-per-socket= cpu-freq= cpus-per-gpu= deadline= delay-boot=
d:dependency= distribution= e:error=! x:exclude= exclusive? export=! export-file=! external! extra=
B:extra-node-info= get-user-env? gid= gpu-bind= gpu-freq= G:gpus= gpus-per-node= gpus-per-socket=
gpus-per-task= gres= gres-flags= hint= H:hold ignore-pbs! i:input=! kill-on-invalid-dep=!
L:licenses= mail-type= mail-user= mcs-label= mem= mem-bind= mem-per-cpu= mem-per-gpu= mem-update=
mincpus= network= nice? k:no-kill? F:nodefile= w:nodelist= n:ntasks= ntasks-per-core=
ntasks-per-gpu= ntasks-per-socket= ntasks-per-tres= oom-kill-step? open-mode=! o:output=!
O:overcommit s:oversubscribe parsable! p:partition= power= prefer= priority= profile= propagate?!
q:qos= Q:quiet reboot reservation= resources= resv-ports? segment= sockets-per-node= spread-job
spread-segments stepmgr switches= thread-spec= threads-per-core= t:time= time-min= tmp= tres-bind=
tres-per-task= uid= use-min-nodes v:verbose W:wait! wait-all-nodes= wckey=
"""
# ``none`` is a value of theirs.
_WITH_NONE = ("export", "gpu-bind", "mem-bind", "profile")
# No directives of a job script.
UNUSABLE = ("autocomplete", "help", "test-only", "usage", "version", "wrap")


class SlurmOption(NamedTuple):
    """An option of sbatch: its letter, or nothing; salloc does not know it where it is
    ``batch_only``.

    It takes ``=`` for a value, ``?`` for one that may be left out, nothing for a flag.
    """

    letter: str
    name: str
    takes: str
    batch_only: bool

    @property
    def kind(self) -> object:
        """Return the type of its value in a YAML file."""
        if self.name == "mail-type":  # sbatch adds up several
            return tuple[str, ...]
        text = str if self.name in _WITH_NONE else str | None
        return {"=": text, "?": bool | str, "": bool}[self.takes]


OPTIONS = {
    name: SlurmOption(letter, name, takes, bool(only))
    for letter, name, takes, only in re.findall(r"(?:(\w):)?([\w-]+)([=?]?)(!?)", _TABLE)
}
_BY_LETTER = {f"-{option.letter}": option for option in OPTIONS.values() if option.letter}


def words(name: str, value: str | bool | Sequence[str] | None) -> list[str]:
    """Write an option as on sbatch's command line.

    Args:
        name: without dashes.
        value: True for an option without a value. Of several texts each is an option of its own;
            False, None and an empty text are none.
    """
    if value is True:
        return [f"--{name}"]
    values = [value] if isinstance(value, str) else value or ()
    return [f"--{name}={each}" for each in values if each]


def split(word: str) -> tuple[str, str | bool]:
    """Return the name and the value of ``--name=value``; True for an option without a value."""
    name, equals, value = word.removeprefix("--").partition("=")
    return name, value if equals else True


def rewrite(
    arguments: Sequence[str], known: Collection[str], with_value: Collection[str]
) -> list[str]:
    """Write the command line as click can read it.

    Each flag of Slurm's gets a value: ``--hold`` is ``--hold=true``, ``--no-hold`` is
    ``--hold=false``. What nobody knows is for sbatch: ``--unknown=x`` is
    ``--sbatch-arg=--unknown=x``, unless it is another launcher's.

    Args:
        arguments: of the command line; what follows the script stays as it is.
        known: options of the command.
        with_value: those of them that take the next word.

    Raises:
        UsageError: a flag has a value.
    """
    left = list(arguments)
    done = []
    while left and left[0].startswith("-") and left[0] not in ("-", "--"):
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            option = OPTIONS.get(name[2:])
        else:
            option = _BY_LETTER.get(name)
        # --no-hold negates --hold. --no-kill is an option of Slurm's own, because there is no
        # --kill.
        negated = OPTIONS.get(name.removeprefix("--no-"))
        if option and option.takes != "=" and not equals:
            done.append(f"--{option.name}=true")
        elif negated and negated.takes != "=" and name not in known and not equals:
            done.append(f"--{negated.name}=false")
        elif option and not option.takes:
            raise UsageError(f"{name} with a value", expected=name, hint="remove the value")
        elif (
            name.startswith("--")
            and name not in known
            and (name[2:] in UNUSABLE or (equals and not foreign(name)))
        ):
            done.append(f"--sbatch-arg={word}")
        else:
            done.append(name + equals + value)
            if name in with_value and not equals and left:
                done.append(left.pop(0))
    return done + left
