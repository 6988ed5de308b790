# Sourced by bin/quickstart and bin/test: an environment in .venv with the tested versions.

# Open MPI refuses root otherwise; both of its generations, and in the environments of CI there is no other user.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1

# bin/srunddp runs under the activated environment: that is to be this one, whatever the shell had.
export VIRTUAL_ENV=$PWD/.venv
unset CONDA_PREFIX

fail() { echo "$(basename "$0"): error: $1" >&2; exit 78; }

find_python() {
  for name in python3.11 python3 python3.12 python3.13; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$name"; return; fi
  done
  fail "no Python 3.11 or newer in PATH -> install one"
}

make_venv() { # FOLDER
  local python; python=$(find_python)
  [ -x "$1/bin/pip" ] && return
  "$python" -m venv "$1" >/dev/null 2>&1 && return
  # Debian keeps venv's pip in a package of its own.
  local package; package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
  install_system "$package" && "$python" -m venv --clear "$1" ||
    fail "$python cannot make a virtual environment -> install $package"
}

install_system() { # PACKAGES...
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  local missing=()
  for package in "$@"; do dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package"); done
  [ ${#missing[@]} = 0 ] && return
  echo "installing ${missing[*]}"
  (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}") \
    >/tmp/srunddp-apt.log 2>&1 || { tail -5 /tmp/srunddp-apt.log >&2; return 1; }
}

pip_install() { # FOLDER ARGUMENTS...
  local folder=$1; shift
  "$folder/bin/pip" install --quiet --disable-pip-version-check -c tests/constraints.txt "$@"
}

SITE_PACKAGES='import sysconfig; print(sysconfig.get_path("purelib"))'

# Other people's frameworks, above the first environment but for its torchvision: they import it where it is there,
# and fail where it was not built for this torch.
make_interop() { # PACKAGES...
  make_venv .venv-interop
  local main=$PWD/.venv-without-torchvision
  rm -rf "$main" && mkdir "$main"
  find "$(.venv/bin/python -c "$SITE_PACKAGES")" -mindepth 1 -maxdepth 1 ! -name "torchvision*" -exec ln -s -t "$main" {} +
  echo "$main" >"$(.venv-interop/bin/python -c "$SITE_PACKAGES")/main-environment.pth"
  pip_install .venv-interop "$@"
}

# One environment for each MPI: both wheels bring an mpirun. The rest comes from the first environment.
make_mpich() {
  make_venv .venv-mpich
  pip_install .venv-mpich mpich mpi4py
  .venv/bin/python -c "$SITE_PACKAGES" >"$(.venv-mpich/bin/python -c "$SITE_PACKAGES")/main-environment.pth"
}

set_up_took() { # of the script that sources this file
  echo "set-up took $((SECONDS / 60)) min $((SECONDS % 60)) s"
}
