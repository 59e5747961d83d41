"""The least that a client of no work could cost: its load, check and fold in one pass of compiled code.

    python benchmarks/one_pass.py [--json FILE]

`no_work.py` compares Atoll's rounds with a mean in place. This asks how near any program could come. The loop
below (C with AVX2, compiled by `cc`) does in one pass over 11 million weights what Atoll does in three. It reads
the update, the global model and the mean; sums what the checks need (squared norms and a product, in float32 for
each 4,096 weights and in float64 above); writes the new mean beside the old one, so that a refused update leaves no
trace; and loads the global model for the next client. It has no names, shapes, layers, integers or checkpoints.
Both run in turns on one thread; the medians of each turn are compared.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from measured import write

WEIGHTS = 11_000_000
LANES = 16  # tensors start at multiples of 64 bytes, as streaming stores need
ONE_PASS = r"""
#include <immintrin.h>
#include <stddef.h>

static double sum(__m256 x) {
  float lanes[8];
  _mm256_storeu_ps(lanes, x);
  double total = 0;
  for (int i = 0; i < 8; i++) total += lanes[i];
  return total;
}

void one_pass(float *update, const float *model, const float *mean, float *next, float share, size_t n,
              double *sums) {
  const __m256 s = _mm256_set1_ps(share);
  for (size_t block = 0; block < n; block += 4096) {
    size_t end = block + 4096 < n ? block + 4096 : n;
    __m256 moved = _mm256_setzero_ps(), own = moved, product = moved;
    for (size_t i = block; i < end; i += 8) {
      __m256 u = _mm256_load_ps(update + i), w = _mm256_load_ps(model + i), m = _mm256_load_ps(mean + i);
      __m256 d = _mm256_sub_ps(u, w);
      moved = _mm256_fmadd_ps(d, d, moved);
      own = _mm256_fmadd_ps(u, u, own);
      product = _mm256_fmadd_ps(u, w, product);
      _mm256_stream_ps(next + i, _mm256_fmadd_ps(_mm256_sub_ps(u, m), s, m));
      _mm256_store_ps(update + i, w);
    }
    sums[0] += sum(moved);
    sums[1] += sum(own);
    sums[2] += sum(product);
  }
}
"""


def compiled(folder: Path) -> ctypes.CDLL:
    """Compile the loop."""
    source, library = folder / "one_pass.c", folder / "one_pass.so"
    source.write_text(ONE_PASS)
    flags = ["-O3", "-mavx2", "-mfma", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def random_weights(seed: int) -> Tensor:
    """Draw normal weights that start at a multiple of 64 bytes."""
    n = WEIGHTS - WEIGHTS % LANES
    room = torch.empty(n + LANES)
    first = -room.data_ptr() // 4 % LANES
    return room[first : first + n].normal_(generator=torch.Generator().manual_seed(seed))


def milliseconds(step: Callable[[], object], repeats: int) -> float:
    """Median time of a step."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=60, help="of each path in each turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    update, model, mean, other = map(random_weights, range(4))
    n, share = len(update), 0.1
    sums = torch.zeros(3, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        loop = compiled(Path(folder)).one_pass

    def one_pass(new: Tensor = other) -> None:
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (update, model, mean, new)]
        loop(*pointers, ctypes.c_float(share), ctypes.c_size_t(n), ctypes.c_void_p(sums.data_ptr()))

    # The loop computes what it says.
    u, w = update.double(), model.double()
    exact = torch.stack([(u - w).square().sum(), u.square().sum(), u @ w])
    expected = mean + share * (update - mean)
    one_pass()
    torch.testing.assert_close(sums, exact, rtol=1e-5, atol=1.0)
    torch.testing.assert_close(other, expected)
    if not torch.equal(update, model):
        raise SystemExit("the loop did not load the model")

    turns = []
    for turn in range(options.turns):
        bare = milliseconds(lambda: mean.lerp_(update, share), options.repeats)
        whole = milliseconds(one_pass, options.repeats)
        turns.append({"bare": bare, "one_pass": whole, "ratio": whole / bare})
        print(f"turn {turn}: mean {bare:.2f} ms, one pass {whole:.2f} ms, {whole / bare:.2f} ×")
    ratios = sorted(each["ratio"] for each in turns)
    print(f"{statistics.median(ratios):.2f} × ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    write(options.json, {"weights": n, "turns": turns, "ratio": statistics.median(ratios)})


if __name__ == "__main__":
    main()
