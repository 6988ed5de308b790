# Sourced by bin/quickstart, bin/test and bin/bench, in the root of the checkout and under `set -e`.
# It sets variables, and defines functions that make environments and install packages. They are called in this order:
#   make_venv FOLDER                an empty environment
#   install_srunddp EXTRAS PACKAGES...  this checkout with its dependencies, and packages, into .venv
#   make_interop PACKAGES...        an environment for other people's frameworks, which sees the packages of .venv
#   make_mpi FOLDER PACKAGE         an environment for one MPI, which does so as well
#   install_system PACKAGES...      Debian's packages, as root; returns 1 where that is not possible
# What fails says so in one line and ends the script with exit code 78.

# Open MPI refuses root otherwise; both of its generations, and in the environments of CI there is no other user.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1

# bin/srunddp runs under the activated environment: that is to be this one, whatever the shell had.
export VIRTUAL_ENV=$PWD/.venv
unset CONDA_PREFIX
# Without compiled files each of the thousands of Pythons that tests start would compile its modules anew.
unset PYTHONDONTWRITEBYTECODE

fail() { echo "$(basename "$0"): error: $1" >&2; exit 78; }

find_python() {
  for name in python3.11 python3 python3.12 python3.13; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$name"; return; fi
  done
  fail "no Python 3.11 or newer in PATH -> install one"
}

make_venv() { # FOLDER
  local folder=$1 python package
  if [ -x "$folder/bin/pip" ]; then return; fi
  python=$(find_python)
  if "$python" -m venv "$folder" >/dev/null 2>&1; then return; fi
  # Debian keeps venv's pip in a package of its own.
  package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
  if install_system "$package" && "$python" -m venv --clear "$folder"; then return; fi
  fail "$python cannot make a virtual environment in $folder -> install $package"
}

is_installed() { # PACKAGE
  [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

install_system() { # PACKAGES...
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return 1; fi
  local missing=() package log
  for package in "$@"; do
    if ! is_installed "$package"; then missing+=("$package"); fi
  done
  if [ ${#missing[@]} = 0 ]; then return; fi
  echo "installing ${missing[*]}"
  # Anybody may put a link under a name in /tmp that is known before, and root would write where it leads.
  log=$(mktemp) || return 1
  if apt-get update >"$log" 2>&1 &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" >>"$log" 2>&1; then
    rm -f "$log"
    return
  fi
  echo "apt-get cannot install ${missing[*]}; the end of its output, all of which is in $log:" >&2
  tail -n 5 "$log" >&2
  return 1
}

pip_install() { # FOLDER ARGUMENTS...
  local folder=$1; shift
  "$folder/bin/pip" install --quiet --disable-pip-version-check -c tests/constraints.txt "$@" ||
    fail "pip cannot install $* in $folder -> see its output above"
}

# This checkout into .venv, editable; as a path for the interpreter, see package_dir in setup.py.
install_srunddp() { # EXTRAS PACKAGES...
  local extras=$1; shift
  pip_install .venv torch  # first and pinned: another package's range would take a newer build
  # setuptools has come with torch. In an environment of its own, pip would fetch it again at each call.
  pip_install .venv --no-build-isolation -e ".[$extras]" "$@"
}

SITE_PACKAGES='import sysconfig; print(sysconfig.get_path("purelib"))'

# Other people's frameworks, above the first environment but for its torchvision: they import it where it is there,
# and fail where it was not built for this torch.
make_interop() { # PACKAGES...
  make_venv .venv-interop
  local main=$PWD/.venv-without-torchvision
  rm -rf "$main"
  mkdir "$main"
  find "$(.venv/bin/python -c "$SITE_PACKAGES")" -mindepth 1 -maxdepth 1 ! -name "torchvision*" -exec ln -s -t "$main" {} +
  echo "$main" >"$(.venv-interop/bin/python -c "$SITE_PACKAGES")/main-environment.pth"
  pip_install .venv-interop "$@"
}

# One environment for each MPI: each wheel brings an mpirun. The rest comes from the first environment.
make_mpi() { # FOLDER PACKAGE
  make_venv "$1"
  pip_install "$1" "$2" mpi4py
  .venv/bin/python -c "$SITE_PACKAGES" >"$("$1/bin/python" -c "$SITE_PACKAGES")/main-environment.pth"
}

set_up_took() { # of the script that sources this file
  echo "set-up took $((SECONDS / 60)) min $((SECONDS % 60)) s"
}
