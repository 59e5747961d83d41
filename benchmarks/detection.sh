#!/bin/sh
# What federated pre-training is worth to a small detector on blood cells: FedSimCLR and a supervised federated encoder
# (Dec-SL), each against the same network from scratch. Run it from the root of the repository; ATOLL_DATA names the
# folder of cifar10/ and bccd/. It continues where it was interrupted; SEEDS="18 19" adds seeds.
#
#   ATOLL_DATA=... SEEDS=17 sh benchmarks/detection.sh
set -e
export OMP_NUM_THREADS=1
OUT=${OUT:-runs/detection}
for seed in ${SEEDS:-17 18 19}; do
  for method in fed_simclr dec_sl; do
    run=$OUT/$method-seed$seed
    atoll run cifar10-cpu --resume --out "$run" --set seed="$seed" method.name=$method train.rounds=10 train.epochs=2 evaluation.every=0 evaluation.map_points=0 engine.workers=1
    atoll detect "$run" bccd --set seed="$seed" size=240 max_size=320 fpn_width=32 rois=64 batch_size=4 epochs=8 schedule=cosine warmup=0.1
  done
  atoll detect "$OUT/fed_simclr-seed$seed" bccd --scratch --set seed="$seed" size=240 max_size=320 fpn_width=32 rois=64 batch_size=4 epochs=8 schedule=cosine warmup=0.1
done
atoll report "$OUT"/*-seed* -o "$OUT/report.html"
python benchmarks/detection.py collect "$OUT" # docs/detection.md
