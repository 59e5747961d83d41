#!/usr/bin/env bash
# A Ray cluster for `atoll run --engine flower-sim --ray ADDRESS`, machine by machine. Requires pip install '.[flower]'.
#
#   cluster.sh head [PORT]      start the first machine of a cluster (port 6379; not 10002 to 19999), and print its ADDRESS
#   cluster.sh join ADDRESS     let this machine join
#   cluster.sh leave            stop Ray on this machine
#
# Further arguments are those of `ray start`: --num-cpus 8, --num-gpus 1, --node-ip-address 10.0.0.1 …
set -euo pipefail
export RAY_USAGE_STATS_ENABLED=0 # Ray reports usage to its developers otherwise

die() { echo "$1" >&2; exit 1; }
command -v ray > /dev/null || die "cluster.sh needs Ray: pip install '.[flower]'"
what=${1:-}
[[ -n $what ]] && shift
case $what in
  head)
    port=6379
    if [[ ${1:-} =~ ^[0-9]+$ ]]; then port=$1; shift; fi
    ray start --head --port "$port" --include-dashboard=false "$@"
    ;;
  join)
    [[ ${1:-} == *:* ]] || die "cluster.sh join needs the ADDRESS that cluster.sh head printed, HOST:PORT"
    address=$1; shift
    ray start --address "$address" "$@"
    ;;
  leave) ray stop "$@" ;;
  *) die "usage: cluster.sh head [PORT] | join ADDRESS | leave" ;;
esac
