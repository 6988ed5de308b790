#!/usr/bin/env bash
# Runs tests in a bed: another release of Debian with its Slurm, in a folder. bin/test calls it, in the root of the checkout.
#   tests/beds/run.sh 24.11|26.05 [--cgroup2] [ARGUMENTS OF PYTEST...]
# If the arguments name no test, it runs all of tests/slurm, or with --cgroup2 the tests of
# tests/beds/cgroup2.txt. See tests/README.md, Beds.
set -euo pipefail
# shellcheck source=tests/environment.sh
. tests/environment.sh

case ${1-} in
  24.11) suite=trixie ;;
  26.05) suite=sid ;;
  *) fail "no bed of Slurm ${1-}; expected 24.11 or 26.05" ;;
esac
version=$1
shift
packages=(mmdebstrap)
kernel=machine
if [ "${1-}" = --cgroup2 ]; then
  kernel=uml # User Mode Linux; here it has control groups of version 2 alone
  packages+=(user-mode-linux)
  shift
fi
checkout=$PWD
beds=$checkout/build/beds
bed=$beds/$version
arguments=("$@")
if [[ " $* " != *" tests"* ]]; then
  if [ "$kernel" = uml ]; then
    mapfile -t -O $# arguments < <(sed '/^#/d' tests/beds/cgroup2.txt)
  else
    arguments+=(tests/slurm)
  fi
fi

build() {
  local mirror
  # By where apt fetches this machine's own packages.
  mirror=$(apt-get indextargets --format "\$(REPO_URI)" "Origin: Debian" "Label: Debian" | head -n 1)
  [ -n "$mirror" ] || fail "apt knows no mirror of Debian -> run apt-get update on a machine with Debian"
  apt-config dump Acquire::http Acquire::https Acquire::Check-Valid-Until >"$beds/apt.conf"
  SECONDS=0
  rm -rf --one-file-system "$bed.new"
  # No slurmdbd and no MariaDB: neither release's slurmdbd runs with its MariaDB 11.8.
  # It mounts folders of this machine in the new one: in a namespace of its own these end with it, however it ends.
  unshare --mount mmdebstrap --quiet --mode=root --variant=minbase --keyring=/usr/share/keyrings --aptopt="$beds/apt.conf" \
    --include=slurm-wlm,munge,iproute2,nftables,openmpi-bin,procps,strace,kmod,ca-certificates,python3 \
    "$suite" "$bed.new" "$mirror"
  mv "$bed.new" "$bed"
  echo "the bed of Slurm $version, Debian $suite, took $SECONDS s and $(du -sm "$bed" | cut -f 1) MB in $bed"
}

# What Python needs, by its paths on this machine: the checkout, the interpreter, and the folders it imports from.
paths_of_python() {
  .venv/bin/python - "$checkout" <<'EOF'
import os, sys
installed = [os.path.realpath(sys.executable)] if sys.base_prefix == "/usr" else [sys.base_prefix]
for path in dict.fromkeys([sys.argv[1], *installed, *sys.path]):
    if os.path.exists(path):
        print(path)
EOF
}

install_system "${packages[@]}" || fail "a bed needs root on Debian and ${packages[*]}"
mkdir -p "$beds"
exec 9>"$bed.lock"
flock 9 # one run at a time in each
[ -d "$bed" ] || build
release=$(chroot "$bed" slurmd -V)
[[ $release = "slurm-wlm $version."* ]] ||
  fail "$bed has $release, but $version was expected -> Debian $suite has another now: mend tests/beds/run.sh"

mapfile -t paths < <(paths_of_python)
cluster=${SRUNDDP_TEST_CLUSTER:-${version/./}}
rm -f "$bed/code"
# How this machine reaches packages: a proxy or an index of its own may have a certificate of its own.
variables=()
for name in $(compgen -e | grep -E '^(PIP_.*|UV_.*|SSL_CERT_FILE|(https?|no)_proxy|(HTTPS?|NO)_PROXY)$' || true); do
  variables+=("$name=${!name}")
done
for path in ${SSL_CERT_FILE:-} ${PIP_FIND_LINKS:-}; do
  [ ! -e "$path" ] || paths+=("$path")
done
declare -p release version kernel checkout paths arguments cluster variables >"$bed/bed.env"
install tests/beds/init.sh "$bed/bed-init"
mkdir -p "$bed/host"
if [ "$kernel" = uml ]; then
  linux.uml mem=4G root=/dev/root rootfstype=hostfs rootflags="$bed" rw init=/bed-init con0=null,fd:1 con=null loglevel=1 &
  trap 'kill -KILL "-$!" 2>/dev/null || true' EXIT # it leads a session of its own, which no Ctrl-C reaches
  wait $! || true
else
  # The bed is the root folder of namespaces of its own; this machine's is put aside as /host. A plain chroot will not do:
  # the cluster's nodes are mount namespaces, whose root has to be a mount.
  cd "$bed"
  unshare --mount --pid --fork --kill-child --propagation private \
    sh -ec "mount --bind . .; cd \"\$PWD\"; pivot_root . host; exec env -i /usr/sbin/chroot . /bed-init"
fi
exit "$(cat "$bed/code")"
