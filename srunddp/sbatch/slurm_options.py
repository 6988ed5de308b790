"""Lists the options of sbatch that srunddp passes on: their names, their letters, and whether they
take a value.
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from srunddp.errors import UsageError
from srunddp.util.usage_errors import foreign

# The options of Slurm 22.05 to 26.05, as LETTER:NAME. "=" means that the option takes a value, "?"
# that it may take one, and "!" that salloc does not have it. Options of SlurmJob (such as --nodes)
# and options of no use in a job script (such as --wrap) are not in the table. Nor are --quiet and
# --verbose, because srunddp sbatch has them as options of srunddp run. --distribution is without
# its letter, because -m is --module in srunddp sbatch.
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
q:qos= reboot reservation= resources= resv-ports? segment= sockets-per-node= spread-job
spread-segments stepmgr switches= thread-spec= threads-per-core= t:time= time-min= tmp= tres-bind=
tres-per-task= uid= use-min-nodes W:wait! wait-all-nodes= wckey=
"""
# Options for which ``none`` is a value. For all others it means that the option is not given.
_WITH_NONE = ("export", "gpu-bind", "mem-bind", "profile")
# Options of sbatch that cannot be directives of a job script.
UNUSABLE = ("autocomplete", "help", "test-only", "usage", "version", "wrap")


class SlurmOption(NamedTuple):
    """An option of sbatch.

    Attributes:
        letter: The option's letter, without the dash; empty if it has none.
        name: The option's name, without dashes.
        takes: ``=`` if the option takes a value, ``?`` if it may take one, empty if it is a flag.
        batch_only: Whether sbatch has the option but salloc does not.
    """

    letter: str
    name: str
    takes: str
    batch_only: bool

    @property
    def kind(self) -> object:
        """The type of the option's value in a YAML file."""
        if self.name == "mail-type":  # sbatch accepts the option several times
            return tuple[str, ...]
        text = str if self.name in _WITH_NONE else str | None
        return {"=": text, "?": bool | str, "": bool}[self.takes]


OPTIONS = {
    name: SlurmOption(letter, name, takes, bool(only))
    for letter, name, takes, only in re.findall(r"(?:(\w):)?([\w-]+)([=?]?)(!?)", _TABLE)
}
# Flags of sbatch that are not in _TABLE, but may be on the command line of sbatch in a script.
_FLAGS_OF_A_JOB = (
    *("--requeue", "--no-requeue", "--quiet", "--verbose", "--test-only"),
    *("-Q", "-v"),
)
_BY_LETTER = {f"-{option.letter}": option for option in OPTIONS.values() if option.letter}


def takes_next(word: str) -> bool:
    """Tell whether a word of sbatch's command line is an option whose value is the next word. An
    unknown option counts as one that takes a value.
    """
    if word.startswith("--"):
        option = OPTIONS.get(word[2:].replace("_", "-"))
        has_value = "=" in word
    else:
        option = _BY_LETTER.get(word)
        has_value = len(word) > 2  # the value follows the letter, as in -N2
    if has_value or word in _FLAGS_OF_A_JOB:
        return False
    return option is None or option.takes == "="


def words(name: str, value: str | bool | Sequence[str] | None) -> list[str]:
    """Return an option as words of sbatch's command line.

    Args:
        name: The name without dashes.
        value: True for an option without a value; several texts give one option each; False, None
            and an empty text give no option.
    """
    if value is True:
        return [f"--{name}"]
    values = [value] if isinstance(value, str) else value or ()
    return [f"--{name}={each}" for each in values if each]


def split(word: str) -> tuple[str, str | bool]:
    """Split ``--name=value`` into name and value; the value is True if there is no ``=``."""
    name, equals, value = word.removeprefix("--").partition("=")
    return name, value if equals else True


def rewrite(
    arguments: Sequence[str], known: Collection[str], with_value: Collection[str]
) -> list[str]:
    """Rewrite the command line so that click can parse it.

    A flag of Slurm gets a value: ``--hold`` becomes ``--hold=true``, ``--no-hold`` becomes
    ``--hold=false``. An option that neither srunddp nor another launcher has is passed on to
    sbatch: ``--unknown=x`` becomes ``--sbatch-arg=--unknown=x``. If such an option has no ``=``, it
    stays as it is, and click refuses it.

    Args:
        arguments: The words of the command line; SCRIPT and all words after it stay as they are.
        known: The names of the command's options, with dashes.
        with_value: The options among ``known`` that take the next word as their value.

    Raises:
        UsageError: An option of Slurm that takes no value has a value.
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
        # --no-hold negates --hold, but --no-kill is an option of Slurm, because there is no --kill.
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
