#!/bin/sh
# Starts Redis with a bound on its memory:   start-redis.sh redis-server redis.conf [arguments of Redis]
#
# WEIR_REDIS_MEMORY (for example 8gb) is the bound. Without it, Redis gets two thirds of what the container or
# control group may use, because rewriting the append-only file needs room as well. If neither has a limit, Redis
# gets a quarter of the machine, which it shares with other services.
set -eu

meminfo=${WEIR_MEMINFO:-/proc/meminfo}
cgroups=${WEIR_CGROUPS:-/sys/fs/cgroup}

machine_bytes() {
    awk '/^MemTotal:/ {printf "%.0f", $2 * 1024}' "$meminfo"
}

# Prints the lowest memory limit of this process's control group and the groups above it; nothing if there is none.
# The files are those of control groups version 2, and of version 1.
limit_bytes() {
    path=$(sed -n 's/^0:://p' /proc/self/cgroup 2>/dev/null || true)
    while :; do
        cat "$cgroups$path/memory.max" 2>/dev/null || true
        [ -n "$path" ] && [ "$path" != / ] || break
        path=${path%/*}
    done | cat - "$cgroups/memory/memory.limit_in_bytes" 2>/dev/null | grep -v max | sort -n | head -n 1
}

if [ -n "${WEIR_REDIS_MEMORY:-}" ]; then
    bound=$WEIR_REDIS_MEMORY
    why="set by WEIR_REDIS_MEMORY"
else
    machine=$(machine_bytes)
    limit=$(limit_bytes)
    # Without a limit, control groups version 1 name a number larger than any memory.
    if [ -n "$limit" ] && [ "${#limit}" -lt 19 ] && [ "$limit" -lt "$machine" ]; then
        bound=$((limit / 3 * 2))
        why="two thirds of the $((limit / 1048576)) MiB that this container may use"
    else
        bound=$((machine / 4))
        why="a quarter of this machine's $((machine / 1048576)) MiB"
    fi
    why="$why; WEIR_REDIS_MEMORY changes it"
fi
echo "Redis' maxmemory is $bound: $why"
exec "$@" --maxmemory "$bound"
