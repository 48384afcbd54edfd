#!/bin/sh
# Two hosts on one machine: network namespaces with a slow link between them, and torchrun on both.
#
#     scripts/two_hosts.sh [-n RANKS_OF_A_HOST] [-r RATE] [-p PYTHON] -- WHAT_TORCHRUN_STARTS …
#     scripts/two_hosts.sh -n 2 -r 400mbit -- train.py configs/debug.toml --layout.pp=1
#
# Links inside a host are fast, the one between them carries RATE in each direction; cores and memory are shared. Needs
# root, iproute2 and tc. It ends as the first host that fails, or with 0, and takes its namespaces away.
set -eu
ranks=2
rate=400mbit
python=${PYTHON:-python3}
while getopts n:r:p: option; do
    case $option in
        n) ranks=$OPTARG ;;
        r) rate=$OPTARG ;;
        p) python=$OPTARG ;;
        *) sed -n '3,4s/^# *//p' "$0" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
if [ $# -eq 0 ]; then
    sed -n '3,4s/^# *//p' "$0" >&2
    exit 2
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "two_hosts.sh makes network namespaces, which needs root" >&2
    exit 2
fi

# Python looks for modules in the working directory first, where somebody may have put a ctypes.py: none here does.
export PYTHONSAFEPATH=1 # which those before 3.11 don't know
run="import sys; sys.path[:] = filter(None, sys.path); del sys.argv[0]; from runpy import run_module; "
run="${run}run_module(sys.argv[0], run_name='__main__', alter_sys=True)"

id=$$
clean() {
    trap '' EXIT INT TERM USR1
    for signal in TERM KILL; do
        for side in 0 1; do
            ip netns pids "dtl-$id-$side" 2> /dev/null | xargs -r kill -"$signal" 2> /dev/null || true
        done
        waited=0 # torchrun ends its ranks
        while [ $waited -lt 50 ] && [ -n "$(ip netns pids "dtl-$id-0"; ip netns pids "dtl-$id-1")" ]; do
            sleep 0.2
            waited=$((waited + 1))
        done 2> /dev/null
    done
    for side in 0 1; do ip netns del "dtl-$id-$side" 2> /dev/null || true; done
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 1' USR1

for side in 0 1; do
    ip netns add "dtl-$id-$side"
    ip -n "dtl-$id-$side" link set lo up
done
ip link add host0 netns "dtl-$id-0" type veth peer name host1 netns "dtl-$id-1"
for side in 0 1; do
    ip -n "dtl-$id-$side" addr add "10.77.0.$((side + 1))/24" dev "host$side"
    ip -n "dtl-$id-$side" link set "host$side" up
    ip netns exec "dtl-$id-$side" tc qdisc add dev "host$side" root tbf rate "$rate" burst 128kb latency 200ms
    {
        GLOO_SOCKET_IFNAME="host$side" NCCL_SOCKET_IFNAME="host$side" TP_SOCKET_IFNAME="host$side" \
            ip netns exec "dtl-$id-$side" "$python" -c "$run" torch.distributed.run --nnodes 2 --node-rank "$side" \
            --nproc-per-node "$ranks" --master-addr 10.77.0.1 --master-port 29577 "$@" || kill -USR1 "$id"
    } &
done
wait # a host that fails ends it
