#!/bin/sh
# From raw text to a trained, resumed and measured MesaNet in minutes; a second run finds everything done.
set -eu
config=configs/quickstart.yaml
run=runs/quickstart

step() { printf '\n== %s\n' "$1"; }

step "tokenizer"
mesatron tokenizer train "$config"
step "shards"
mesatron data prepare "$config"

if [ ! -e "$run/checkpoints/step-00000200" ]; then
  step "training on 2 processes, stopped on purpose after 150 of 300 steps"
  mesatron train "$config" --processes 2 --stop-at-step 150 || [ $? -eq 75 ]
fi
step "training again: it goes on from the checkpoint"
mesatron train "$config" --processes 2

step "perplexity on held-out text"
mesatron evaluate perplexity "$run"
step "a sample"
mesatron generate "$run" --prompt "It is a truth universally acknowledged, that" --max-new-tokens 60 --temperature 0.8
step "summary"
mesatron summary "$run"
