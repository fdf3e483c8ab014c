#!/usr/bin/env bash
# In place of Python in tests of launchers: a rank that counts iterations, goes on from its checkpoint, and saves one
# when it gets SIGTERM, as Megatron does with --exit-signal-handler.
set -euo pipefail

case ${1:-} in
    -c) exit ;; # whether it is new enough
    -P) # which modules there are
        echo -n "torch megatron.core "
        exit
        ;;
esac

checkpoint=''
previous=''
for word in "$@"; do
    [ "$previous" != --save ] || checkpoint=$word
    previous=$word
done

stopped=0
trap 'stopped=1' TERM
getent hosts "$MASTER_ADDR" >/dev/null # every node finds the first
echo "rank $RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE, on $(hostname), meets at $MASTER_ADDR:$MASTER_PORT"
echo "script $1, CUDA_DEVICE_MAX_CONNECTIONS=$CUDA_DEVICE_MAX_CONNECTIONS"
iteration=$(cat "$checkpoint/rank-$RANK" 2>/dev/null || echo 0)
while ((!stopped)); do
    iteration=$((iteration + 1))
    echo " iteration $iteration/ on rank $RANK"
    sleep 0.5 || true # the signal ends it, too
done
mkdir -p "$checkpoint"
echo "$iteration" >"$checkpoint/rank-$RANK"
echo "rank $RANK saved iteration $iteration"
