"""Lists the options of the launchers that ``srunddp sbatch --from`` replaces, and how each is
handled.

No option is dropped silently: an option that has an effect is carried over to the new command, or
is refused. For each other option the table says why nothing is lost. An option that is not in the
table is refused. The tests compare the table with the launchers' own parsers.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Size:
    """The option sets the number of ranks. In the new command, options of srun set this number."""


@dataclass(frozen=True)
class Module:
    """SCRIPT is a module's name: ``srunddp -m``."""


@dataclass(frozen=True)
class NoEffect:
    """The ranks are the same without the option.

    Attributes:
        why: Why the option makes no difference to the ranks.
        noted: Whether the user gets a note, because output or a variable is different.
    """

    why: str
    noted: bool = False


@dataclass(frozen=True)
class Refused:
    """The option is refused, because neither srun nor srunddp can do the same.

    Attributes:
        hint: What to write instead.
    """

    hint: str


@dataclass(frozen=True)
class RunOption:
    """An option of ``srunddp run`` does the same.

    Attributes:
        option: The option; ``{}`` is replaced by the first group of ``pattern``.
        pattern: A regular expression that the value has to match.
        otherwise: How any other value is handled.
    """

    option: str
    pattern: str = "(.+)"
    otherwise: NoEffect | Refused = Refused("write a value")


@dataclass(frozen=True)
class Output:
    """The option sets where the ranks' output goes. All such options together are replaced by
    options of ``srunddp run`` (see :func:`run_options`).
    """


@dataclass(frozen=True)
class Exported:
    """accelerate launch passes the value to the ranks in a variable.

    Attributes:
        variable: The name of the variable.
        when: The name of another option, without which accelerate launch ignores this option; empty
            if this option needs no other.
        default: The value that accelerate launch exports if ``when`` is given and this option is
            not; empty if it then exports none.
        without: A value that is refused, because with it accelerate launch exports further
            variables; empty if no value is refused.
        lower: Whether accelerate launch writes the value in lower case.
    """

    variable: str
    when: str = ""
    default: str = ""
    without: str = ""
    lower: bool = False


Meaning = Size | Module | NoEffect | Refused | RunOption | Output | Exported


@dataclass(frozen=True)
class Option:
    """An option of a launcher.

    Attributes:
        name: The name without dashes before it, and with a dash for each ``_``.
        meaning: How the option is handled.
        flag: Whether the option takes no value.
        neutral: The values with which the option does nothing.
        letters: Other names of the option: single letters, or older names.
    """

    name: str
    meaning: Meaning
    flag: bool = False
    neutral: tuple[str, ...] = ()
    letters: tuple[str, ...] = ()


_RENDEZVOUS = NoEffect("srunddp finds rank 0 by itself")
_AGENT = NoEffect("it concerns the launcher's own process, which is not started")
_ROLE = NoEffect("ROLE_NAME is default, and lines have no role before them", noted=True)
_NAMES = NoEffect("it names a plug-in for torchrun's own events", noted=True)
_NO_PYTHON = Refused("srunddp runs a Python script: name that, or start the program by srun alone")
_TIMEOUT = RunOption(
    "--timeout={}", r"(?:.*,)?(?:join_)?timeout=(\d+)(?:,.*)?", otherwise=_RENDEZVOUS
)
_RESTARTS = RunOption("--restarts={}")
_BIND = Refused("remove it, and add --cpu-bind to srun in the script that is written")

TORCHRUN = (
    Option("nnodes", Size()),
    Option("nproc-per-node", Size()),
    Option("rdzv-backend", _RENDEZVOUS),
    Option("rdzv-endpoint", _RENDEZVOUS),
    Option("rdzv-id", _RENDEZVOUS),
    Option("rdzv-conf", _TIMEOUT),
    Option("standalone", _RENDEZVOUS, flag=True),
    Option("node-rank", _RENDEZVOUS),
    Option("master-addr", _RENDEZVOUS),
    Option("master-port", _RENDEZVOUS),
    Option("local-addr", NoEffect("--ifaces selects each node's address", noted=True)),
    Option("max-restarts", _RESTARTS, neutral=("0",)),
    Option("monitor-interval", _AGENT),
    Option("start-method", _AGENT),
    Option("signals-to-handle", _AGENT),
    Option("event-log-handler", _NAMES, neutral=("null",)),
    Option("logs-specs", _NAMES),
    Option("role", _ROLE, neutral=("default",)),
    Option("module", Module(), flag=True, letters=("m",)),
    Option("no-python", _NO_PYTHON, flag=True),
    Option("run-path", NoEffect("srunddp runs the script so"), flag=True),
    Option("log-dir", Output()),
    Option("redirects", Output(), neutral=("0",), letters=("r",)),
    Option("tee", Output(), neutral=("0",), letters=("t",)),
    Option(
        "local-ranks-filter",
        Refused("remove it; srunddp --log-dir=logs shows only rank 0"),
    ),
    Option("duplicate-stdout-filters", Refused("remove it, and filter the job's log")),
    Option("duplicate-stderr-filters", Refused("remove it, and filter the job's log")),
    Option("numa-binding", RunOption("--bind=auto", "exclusive", otherwise=_BIND)),
    Option("shutdown-timeout", RunOption("--grace={}")),
    Option(
        "virtual-local-rank",
        Refused("remove it; with srun --gpus-per-task=1 each rank sees only its own GPU"),
        flag=True,
    ),
)

LAUNCH = (
    *TORCHRUN,
    Option("use-env", NoEffect("srunddp exports LOCAL_RANK"), flag=True),
)

_ELSEWHERE = NoEffect("it is for TPUs or a cloud only, which --tpu or a file would choose")
_HERE = NoEffect("Slurm chooses the nodes")
_FP8 = NoEffect("it needs --mixed_precision=fp8, which is refused")
_MEGATRON = NoEffect("it needs --use_megatron_lm, which is refused")
_PARALLELISM = NoEffect("it needs --use_parallelism_config, which is refused")
_TO_ACCELERATOR = "give it to Accelerator(…) in the script: {}"

# Names of options that have an effect only with another option, which is refused. The beginning
# that the names have in common, such as megatron-lm-, is left out.
_MEGATRON_LM = (
    "tp-degree",
    "use-custom-fsdp",
    "no-load-optim",
    "eod-mask-loss",
    "overlap-cpu-optimizer-d2h-h2d",
    "no-save-optim",
    "optimizer-cpu-offload",
    "use-precision-aware-optimizer",
    "decoder-last-pipeline-num-layers",
    "pp-degree",
    "num-micro-batches",
    "sequence-parallelism",
    "recompute-activations",
    "use-distributed-optimizer",
    "gradient-clipping",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "attention-backend",
    "expert-model-parallel-size",
    "context-parallel-size",
    "attention-dropout",
    "hidden-dropout",
    "attention-softmax-in-fp32",
    "expert-tensor-parallel-size",
    "calculate-per-token-loss",
    "use-rotary-position-embeddings",
)
_PARALLELISM_CONFIG = (
    "dp-replicate-size",
    "dp-shard-size",
    "tp-size",
    "cp-size",
    "cp-backend",
    "cp-comm-strategy",
    "sp-size",
    "sp-backend",
    "sp-seq-length",
    "sp-seq-length-is-variable",
    "sp-attn-implementation",
)
_FP8_RECIPE = (
    "backend",
    "use-autocast-during-eval",
    "margin",
    "interval",
    "format",
    "amax-history-len",
    "amax-compute-algo",
    "override-linear-precision",
    "opt-level",
    "enable-fsdp-float8-all-gather",
    "pad-inner-dim",
)
_TPU_OR_CLOUD = (
    "no-tpu-cluster",
    "tpu-use-sudo",
    "vm",
    "env",
    "main-training-function",
    "downcast-bf16",
    "aws-access-key-id",
    "aws-secret-access-key",
)


def _fsdp(name: str, variable: str, default: str = "", *, lower: bool = False) -> Option:
    return Option(f"fsdp-{name}", Exported(f"FSDP_{variable}", "use-fsdp", default, lower=lower))


def _deepspeed(name: str, variable: str, *, lower: bool = False) -> Option:
    return Option(name, Exported(f"ACCELERATE_{variable}", "use-deepspeed", lower=lower))


def _dynamo(name: str, default: str, *, flag: bool = False) -> Option:
    variable = "ACCELERATE_DYNAMO_" + name.upper().replace("-", "_")
    return Option(f"dynamo-{name}", Exported(variable, "dynamo-backend", default), flag=flag)


ACCELERATE = (
    Option("num-processes", Size()),
    Option("num-machines", Size()),
    Option("machine-rank", _RENDEZVOUS),
    Option("main-process-ip", _RENDEZVOUS),
    Option("main-process-port", _RENDEZVOUS),
    Option("same-network", _RENDEZVOUS, flag=True),
    Option("rdzv-backend", _RENDEZVOUS),
    Option("rdzv-conf", _TIMEOUT),
    Option("multi-gpu", NoEffect("so do several ranks"), flag=True),
    Option("quiet", _AGENT, flag=True, letters=("q",)),
    Option("max-restarts", _RESTARTS, neutral=("0",)),
    Option("monitor-interval", _AGENT),
    Option("role", _ROLE, neutral=("default",)),
    Option("module", Module(), flag=True, letters=("m",)),
    Option("no-python", _NO_PYTHON, flag=True),
    Option("log-dir", Output()),
    Option("tee", Output(), neutral=("0",), letters=("t",)),
    Option(
        "config-file",
        Refused(
            "only accelerate launch reads this file: write its values as options in its place, such"
            " as --mixed_precision=bf16 or --use_fsdp, which become variables"
        ),
    ),
    Option("cpu", Exported("ACCELERATE_USE_CPU"), flag=True),
    Option("debug", Exported("ACCELERATE_DEBUG_MODE"), flag=True),
    Option("gpu-ids", Refused("remove it, and ask Slurm for as many GPUs"), neutral=("all",)),
    Option("mixed-precision", Exported("ACCELERATE_MIXED_PRECISION", without="fp8")),
    Option("num-cpu-threads-per-process", Exported("OMP_NUM_THREADS")),
    Option("enable-cpu-affinity", Exported("ACCELERATE_CPU_AFFINITY"), flag=True),
    Option("dynamo-backend", Exported("ACCELERATE_DYNAMO_BACKEND"), neutral=("no",)),
    _dynamo("mode", "default"),
    _dynamo("use-fullgraph", "False", flag=True),
    _dynamo("use-dynamic", "False", flag=True),
    _dynamo("use-regional-compilation", "False", flag=True),
    Option("use-fsdp", Exported("ACCELERATE_USE_FSDP"), flag=True),
    _fsdp("version", "VERSION", "1"),
    _fsdp("sharding-strategy", "SHARDING_STRATEGY", "FULL_SHARD"),
    _fsdp("reshard-after-forward", "RESHARD_AFTER_FORWARD", "true", lower=True),
    _fsdp("offload-params", "OFFLOAD_PARAMS", "false", lower=True),
    _fsdp("min-num-params", "MIN_NUM_PARAMS", "100000000"),
    _fsdp("auto-wrap-policy", "AUTO_WRAP_POLICY"),
    _fsdp("transformer-layer-cls-to-wrap", "TRANSFORMER_CLS_TO_WRAP"),
    _fsdp("backward-prefetch", "BACKWARD_PREFETCH"),
    _fsdp("state-dict-type", "STATE_DICT_TYPE"),
    _fsdp("forward-prefetch", "FORWARD_PREFETCH", "false", lower=True),
    _fsdp("use-orig-params", "USE_ORIG_PARAMS", "true", lower=True),
    _fsdp("cpu-ram-efficient-loading", "CPU_RAM_EFFICIENT_LOADING", "true", lower=True),
    _fsdp("sync-module-states", "SYNC_MODULE_STATES", "true", lower=True),
    _fsdp("activation-checkpointing", "ACTIVATION_CHECKPOINTING", "false", lower=True),
    _fsdp(
        "activation-checkpointing-offload",
        "ACTIVATION_CHECKPOINTING_OFFLOAD",
        "false",
        lower=True,
    ),
    Option("use-deepspeed", Exported("ACCELERATE_USE_DEEPSPEED"), flag=True),
    _deepspeed("zero-stage", "DEEPSPEED_ZERO_STAGE"),
    _deepspeed("gradient-accumulation-steps", "GRADIENT_ACCUMULATION_STEPS"),
    _deepspeed("gradient-clipping", "GRADIENT_CLIPPING"),
    _deepspeed("offload-optimizer-device", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", lower=True),
    _deepspeed("offload-param-device", "DEEPSPEED_OFFLOAD_PARAM_DEVICE", lower=True),
    _deepspeed("zero3-init-flag", "DEEPSPEED_ZERO3_INIT", lower=True),
    _deepspeed("zero3-save-16bit-model", "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", lower=True),
    _deepspeed("deepspeed-config-file", "DEEPSPEED_CONFIG_FILE"),
    _deepspeed("deepspeed-moe-layer-cls-names", "DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    Option(
        "offload-optimizer-nvme-path",
        Refused("export ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH in its place"),
    ),
    Option(
        "offload-param-nvme-path",
        Refused("export ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH in its place"),
    ),
    Option("deepspeed-hostfile", _HERE),
    Option("deepspeed-multinode-launcher", _HERE),
    Option("deepspeed-inclusion-filter", Refused("remove it; use --nodelist of sbatch")),
    Option("deepspeed-exclusion-filter", Refused("remove it; use --exclude of sbatch")),
    Option(
        "use-megatron-lm",
        Refused(_TO_ACCELERATOR.format("megatron_lm_plugin=MegatronLMPlugin(…)")),
        flag=True,
    ),
    *(Option(f"megatron-lm-{name}", _MEGATRON) for name in _MEGATRON_LM),
    Option(
        "use-parallelism-config",
        Refused(_TO_ACCELERATOR.format("parallelism_config=ParallelismConfig(…)")),
        flag=True,
    ),
    *(Option(f"parallelism-config-{name}", _PARALLELISM) for name in _PARALLELISM_CONFIG),
    *(Option(f"fp8-{name}", _FP8, flag=name == "use-autocast-during-eval") for name in _FP8_RECIPE),
    Option("tpu", Refused("start TPUs by accelerate launch"), flag=True),
    Option("tpu-cluster", Refused("start TPUs by accelerate launch"), flag=True),
    *(
        Option(name, _ELSEWHERE, flag=name in ("no-tpu-cluster", "tpu-use-sudo", "downcast-bf16"))
        for name in _TPU_OR_CLOUD
    ),
    Option("mpirun-hostfile", Refused("remove it; srun starts the ranks")),
)

DEEPSPEED = (
    Option("num-nodes", Size()),
    Option("num-gpus", Size(), letters=("num-accelerators",)),
    Option("hostfile", Size(), letters=("H",)),
    Option("include", Refused("remove it; use --nodelist of sbatch"), letters=("i",)),
    Option("exclude", Refused("remove it; use --exclude of sbatch"), letters=("e",)),
    Option("master-port", _RENDEZVOUS),
    Option("master-addr", _RENDEZVOUS),
    Option("node-rank", _RENDEZVOUS),
    Option("launcher", _HERE),
    Option("launcher-args", Refused("give the options to srun, after the conversion")),
    Option("comment", _HERE),
    Option("account", _HERE),
    Option("module", Module(), flag=True),
    Option("no-python", _NO_PYTHON, flag=True),
    Option("no-local-rank", NoEffect("srunddp passes none"), flag=True),
    Option("no-ssh", _HERE, flag=True),
    Option("no-ssh-check", _HERE, flag=True),
    Option("ssh-port", _HERE),
    Option("force-multi", _HERE, flag=True),
    Option("save-pid", _AGENT, flag=True),
    Option("enable-each-rank-log", RunOption("--log-dir={}"), neutral=("None",)),
    Option("bind-cores-to-rank", RunOption("--bind=auto", ""), flag=True),
    Option("bind-core-list", _BIND),
    Option("autotuning", Refused("tune by deepspeed on one node first")),
    Option("elastic-training", Refused("remove it: the number of ranks is fixed"), flag=True),
    Option("min-elastic-nodes", Refused("remove it: the number of ranks is fixed")),
    Option("max-elastic-nodes", Refused("remove it: the number of ranks is fixed")),
)

# A word in a hint, which stands for the variables that replace the values of accelerate's file.
VALUES = "VALUES"
# The values that flags have in their variables. A flag that is not listed has the value "true".
_FLAG_VALUES = {"ACCELERATE_CPU_AFFINITY": "1"}
# With --use_deepspeed, accelerate launch also lets the ranks import from the current folder.
_IMPORTS = ('PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD"',)


def find(table: Sequence[Option], name: str) -> Option | None:
    """Find an option by a name, by a letter, or, as argparse does, by the beginning of a name.

    Args:
        table: The options of the launcher.
        name: The name without dashes before it, and with a dash for each ``_``.

    Returns:
        None if there is no such option, or if several options begin with this name.
    """
    for option in table:
        if name == option.name or name in option.letters:
            return option
    # Only accelerate requires whole names. No job script has a command that accelerate refuses, so
    # accept the beginning of a name for all launchers.
    begun = [option for option in table if len(name) > 1 and option.name.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    return None


@dataclass(frozen=True)
class Given:
    """The options of a launch.

    Attributes:
        table: The options that the launcher has.
        values: The values of the given options, by name; a flag has an empty value.
        unknown: The first given option that the launcher does not have, as the script writes it;
            empty if there is none.
        unclear: The given options whose values would change without their quotes: the words of the
            script, by the name of the option.
    """

    table: Sequence[Option]
    values: Mapping[str, str]
    unknown: str = ""
    unclear: Mapping[str, str] = field(default_factory=dict)

    def acting(self) -> list[tuple[Option, str]]:
        """Return the given options that do something, with their values."""
        given = []
        for option in self.table:
            if option.name in self.values and self.values[option.name] not in option.neutral:
                given.append((option, self.values[option.name]))
        return given

    def has(self, name: str) -> bool:
        """Tell whether an option is given, with a value with which it does something."""
        return any(option.name == name for option, _ in self.acting())


def refused(given: Given) -> tuple[str, str] | None:
    """Return the first option that neither srun nor srunddp replaces, and a hint.

    Returns:
        None if all given options are carried over to the new command, or do nothing.
    """
    if given.unknown:
        return given.unknown, "correct it, or remove it"
    for option, value in given.acting():
        shown = f"--{option.name}={value}".removesuffix("=")
        match option.meaning:
            case Refused(hint=hint):
                return shown, hint
            case RunOption(pattern=pattern, otherwise=Refused(hint=hint)):
                if not re.fullmatch(pattern, value):
                    return shown, hint
            case Output() if option.name != "log-dir":
                if value != "3":
                    return shown, "write 3 for both streams of all ranks, or 0"
                if option.name == "redirects" and not (given.has("log-dir") or given.has("tee")):
                    return shown, "add --log-dir=logs"
            case Exported(without=value_refused) if value_refused and value == value_refused:
                hint = _TO_ACCELERATOR.format("kwargs_handlers=[FP8RecipeKwargs(…)]")
                return shown, hint
    return None


def needs_quotes(given: Given) -> tuple[str, str] | None:
    """Return the first option whose value would change in the new command, because it loses its
    quotes there, and a hint; None if there is no such option.
    """
    for option, _ in given.acting():
        is_written_anew = isinstance(option.meaning, Size | RunOption | Output | Exported)
        if is_written_anew and option.name in given.unclear:
            return (
                f"{given.unclear[option.name]}, with quotes, a backslash or ~ in its value",
                "set a variable to the value in a line before, and write the variable here",
            )
    return None


def notes(given: Given) -> list[str]:
    """Return a sentence for each given option that is left out, if output or variables change
    without the option.
    """
    return [
        f"--{option.name} is left out: {option.meaning.why}"
        for option, _ in given.acting()
        if isinstance(option.meaning, NoEffect) and option.meaning.noted
    ]


def run_options(given: Given) -> list[str]:
    """Return the options of ``srunddp run`` that replace options of the launcher, as words of
    bash.
    """
    words = []
    for option, value in given.acting():
        if isinstance(option.meaning, RunOption):
            found = re.fullmatch(option.meaning.pattern, value)
            if found:
                words.append(option.meaning.option.format(quoted("".join(found.groups()))))
    log_dir = quoted(given.values.get("log-dir", ""))
    if given.has("tee"):
        if log_dir:
            words += [f"--log-dir={log_dir}", "--show-ranks=all"]
        words.append("--prefix")
    elif given.has("redirects"):
        words += [f"--log-dir={log_dir}", "--show-ranks=none"]
    return words


def exports(given: Given) -> list[str]:
    """Return the variables that accelerate launch exports for its options, as ``NAME=VALUE``, with
    quotes for bash.
    """
    words = []
    for option in given.table:
        meaning = option.meaning
        if not isinstance(meaning, Exported) or (meaning.when and not given.has(meaning.when)):
            continue
        if given.has(option.name):
            value = given.values[option.name]
            if option.flag:
                value = _FLAG_VALUES.get(meaning.variable, "true")
            if meaning.lower and "$" not in value:
                value = value.lower()
        else:
            value = meaning.default
        if value:
            words.append(f"{meaning.variable}={quoted(value)}")
    if given.has("use-deepspeed"):
        words += _IMPORTS
    if given.has("config-file"):
        words.append(VALUES)
    return words


def quoted(value: str) -> str:
    """Return a value in quotes for bash, if it needs them to stay one word. bash replaces variables
    in the value.
    """
    if not value or value.isalnum():
        return value
    if re.search("[$`]", value):
        return f'"{value}"'
    return shlex.quote(value)
