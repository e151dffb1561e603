#!/bin/sh
# Starts a game of VizDoom with the arguments that VizDoom gives, again if it ends before it has made its shared memory.
# VizDoom reads that when a game ends, and crashes the waiting process where there is none. So this never ends before a
# game runs; after three tries it makes a file that says so.
exec 3>&2 2>/dev/null # this shell would tell of every game that was killed
for argument; do
  [ "$previous" = +viz_instance_id ] && id=$argument
  case $argument in -host | -join) exec 3>/dev/null ;; esac # a page about who is waited for
  previous=$argument
done
for try in 1 2 3; do
  "$BEAST_DOOM_GAME" "$@" 2>&3 3>&- &
  game=$!
  while kill -0 $game 2>/dev/null; do
    if [ -e "/dev/shm/ViZDoomSM$id" ]; then
      wait $game
      exit
    fi
    sleep 0.05
  done
done
: >"/dev/shm/ViZDoomGaveUp$id"
while :; do sleep 5; done
