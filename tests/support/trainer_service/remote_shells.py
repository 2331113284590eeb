"""Scripts in place of `ssh` and `pdsh`, which deepspeed's launcher calls: they enter a host's namespaces.

deepspeed --hostfile ─▶ ssh weir1 hostname -I
                     └▶ pdsh -S -f N -w weir1,weir2 … --node_rank=%n … ─┬─▶ weir1
                                                                        └─▶ weir2
"""

from collections.abc import Sequence
from pathlib import Path

from tests.support.trainer_service.hosts import Host

SSH = """#!/bin/sh
[ "$1" = -o ] && shift 2
host=$1; shift
case "$host" in
{cases}
esac
exit 255
"""
PDSH = """#!/bin/sh
[ "$1 $2 $4" = "-S -f -w" ] || exit 64
hosts=$(echo "$5" | tr , ' '); shift 5
number=0
for host in $hosts; do
  ssh "$host" "$(echo "$*" | sed "s/%n/$number/")" & running="$running $!"
  number=$((number + 1))
done
status=0
for each in $running; do wait "$each" || status=$?; done
exit $status
"""
"""As pdsh -S: %n is the number of the host, and a command that fails decides the status. It waits for all."""


def write_remote_shells(folder: Path, hosts: Sequence[Host]) -> None:
    """Write the two scripts into `folder`, for a PATH that begins with it."""
    folder.mkdir()
    cases = [f'{host.name}) exec {" ".join(host.enter("sh", "-c"))} "$*" ;;' for host in hosts]
    for name, text in (("ssh", SSH.format(cases="\n".join(cases))), ("pdsh", PDSH)):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
