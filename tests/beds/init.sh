#!/bin/bash
# The first process in a bed; tests/beds/run.sh puts it there, with its variables.
# It lets the bed look like a machine, runs pytest, and notes its exit code in /code.
set -euo pipefail
declare release version kernel checkout cluster # and these are lists:
declare -a paths arguments variables
# shellcheck source=/dev/null
. /bed.env
export PATH=$checkout/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root SHELL=/bin/bash LC_ALL=C.UTF-8 TERM=dumb VIRTUAL_ENV=$checkout/.venv
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export SRUNDDP_TEST_CLUSTER=$cluster SRUNDDP_TEST_BED="$version $kernel"
for variable in "${variables[@]}"; do export "${variable?}"; done

with_user_mode_linux() { # whose root folder is the bed; this machine's is mounted as /host
  local folder module
  mount -t hostfs none /host -o /
  mount -t devtmpfs dev /dev
  mkdir -p /dev/pts /dev/shm
  mount -t devpts devpts /dev/pts
  ln -sfn /proc/self/fd /dev/fd
  for folder in /dev/shm /var/tmp /mnt; do mount -t tmpfs tmpfs "$folder"; done
  mount -t cgroup2 none /sys/fs/cgroup
  # A group with processes of its own can limit none below it.
  mkdir /sys/fs/cgroup/init
  echo $$ >/sys/fs/cgroup/init/cgroup.procs
  echo "+cpu +memory +pids +io" >/sys/fs/cgroup/cgroup.subtree_control
  mkdir -p /usr/lib/modules
  mount --bind /host/usr/lib/uml/modules /usr/lib/modules
  ip link set lo up
  for module in veth bridge; do modprobe "$module"; done
}

with_this_kernel() {
  mount --rbind /host/dev /dev
  mount --rbind /host/sys/fs/cgroup /sys/fs/cgroup
}

bring() { # PATH: of this machine, to the same place
  if [ -d "/host$1" ]; then mkdir -p "$1"; else mkdir -p "$(dirname "$1")"; touch "$1"; fi
  mount --bind "/host$1" "$1"
}

mount -t proc proc /proc
mount -t sysfs sysfs /sys
for folder in /run /tmp; do mount -t tmpfs tmpfs "$folder"; done
mkdir -p /run/lock /run/netns
echo "127.0.0.1 localhost" >/etc/hosts
if [ "$kernel" = uml ]; then with_user_mode_linux; else with_this_kernel; fi
for path in "${paths[@]}"; do bring "$path"; done
umount -l /host
mount --make-rshared /
cd "$checkout"
code=0
.venv/bin/python -m pytest -p no:cacheprovider "${arguments[@]}" | cat || code=$? # through cat: the console is a terminal
echo "$code" >/code
echo "bed of $release ($kernel): pytest ended with $code; above are the reasons of what was skipped"
[ "$kernel" != uml ] || python -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)' # RB_POWER_OFF of reboot(2)
