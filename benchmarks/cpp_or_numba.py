"""Would C++ be faster than numba on a CPU? Times the prefix of DAR in both, interleaved. Needs a C++ compiler.

    python benchmarks/cpp_or_numba.py                # 2048 tokens, width 640, nine states, float32, one thread
    python benchmarks/cpp_or_numba.py --threads 2 --json

The C++ is the plain algorithm of `dualres/ops/cpu/prefix.py`: one token at a time, its rows copied side by side, OpenMP
over tokens.
It lacks later tuning: it does not prefetch rows, nor compute two sums in one pass.
Freed memory stays with the process, so that no time is spent on page faults.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import load_inline

from dualres.ops import autograd
from dualres.train.process_group import keep_freed_memory
from dualres.util.tables import table

KEY, VALUE, EPS = [1, 0], [0, 1], 1e-6
SOURCE = r"""
#include <torch/extension.h>
#include <cmath>
#include <omp.h>
#include <vector>
using torch::Tensor;
static float dot(const float* a, const float* b, int n) {
  float total = 0;
  #pragma omp simd reduction(+ : total)
  for (int d = 0; d < n; d++) total += a[d] * b[d];
  return total;
}
static void add(float* total, float weight, const float* row, int n) {
  #pragma omp simd
  for (int d = 0; d < n; d++) total[d] += weight * row[d];
}
static float* row_at(const Tensor& x, long j, long t) { return x.data_ptr<float>() + (j * x.size(2) + t) * x.size(3); }

std::vector<Tensor> forward(std::vector<Tensor> history, Tensor queries, double eps) {
  const long R = history.size(), N = history[0].size(2), D = history[0].size(3), U = queries.size(0), M = 2 * U;
  std::vector<Tensor> found;
  for (long u = 0; u < U; u++) found.push_back(torch::empty_like(history[0]));
  Tensor partition = torch::empty({N, M}), logits = torch::empty({N, R, M}), norms = torch::empty({N, R, 2});
  const float* q = queries.data_ptr<float>();
  #pragma omp parallel
  {
    std::vector<float> rows(R * 2 * D), total(D);
    #pragma omp for
    for (long t = 0; t < N; t++) {
      float* a = logits.data_ptr<float>() + t * R * M;
      for (long r = 0; r < R; r++) for (long j = 0; j < 2; j++) {
        float* row = &rows[(r * 2 + j) * D];
        std::copy_n(row_at(history[r], j, t), D, row);
        const float norm = 1 / std::sqrt(dot(row, row, D) / D + eps);
        norms.data_ptr<float>()[(t * R + r) * 2 + j] = norm;
        for (long u = 0; u < U; u++) a[r * M + 2 * u + 1 - j] = dot(q + (2 * u + 1 - j) * D, row, D) * norm;
      }
      for (long m = 0; m < M; m++) {
        float highest = a[m], mass = 0;
        for (long r = 1; r < R; r++) highest = std::max(highest, a[r * M + m]);
        for (long r = 0; r < R; r++) mass += std::exp(a[r * M + m] - highest);
        partition.data_ptr<float>()[t * M + m] = highest + std::log(mass);
        std::fill(total.begin(), total.end(), 0.f);
        for (long r = 0; r < R; r++)
          add(total.data(), std::exp(a[r * M + m] - highest) / mass, &rows[(r * 2 + m % 2) * D], D);
        std::copy_n(total.data(), D, row_at(found[m / 2], m % 2, t));
      }
    }
  }
  found.push_back(partition); found.push_back(logits); found.push_back(norms);
  return found;
}

std::vector<Tensor> backward(std::vector<Tensor> given, std::vector<Tensor> history, Tensor queries, Tensor partition,
                             Tensor logits, Tensor norms) {
  const long R = history.size(), N = history[0].size(2), D = history[0].size(3), U = queries.size(0), M = 2 * U;
  std::vector<Tensor> found;
  for (auto& state : history) found.push_back(torch::empty_like(state));
  Tensor partial = torch::zeros({omp_get_max_threads(), M, D});
  const float* q = queries.data_ptr<float>();
  #pragma omp parallel
  {
    std::vector<float> rows(R * 2 * D), bank(M * D), p(R * M), da(R * M);
    float* dq = partial.data_ptr<float>() + omp_get_thread_num() * M * D;
    #pragma omp for
    for (long t = 0; t < N; t++) {
      const float *a = logits.data_ptr<float>() + t * R * M, *z = partition.data_ptr<float>() + t * M;
      for (long m = 0; m < M; m++) std::copy_n(row_at(given[m / 2], m % 2, t), D, &bank[m * D]);
      for (long r = 0; r < R; r++) for (long j = 0; j < 2; j++) {
        float* row = &rows[(r * 2 + j) * D];
        std::copy_n(row_at(history[r], j, t), D, row);
        for (long u = 0; u < U; u++) da[r * M + 2 * u + j] = dot(&bank[(2 * u + j) * D], row, D);
      }
      for (long m = 0; m < M; m++) {
        float delta = 0;
        for (long r = 0; r < R; r++) {
          p[r * M + m] = std::exp(a[r * M + m] - z[m]);
          delta += p[r * M + m] * da[r * M + m];
        }
        for (long r = 0; r < R; r++) da[r * M + m] = p[r * M + m] * (da[r * M + m] - delta);
      }
      for (long r = 0; r < R; r++) for (long j = 0; j < 2; j++) {
        const float *row = &rows[(r * 2 + j) * D], norm = norms.data_ptr<float>()[(t * R + r) * 2 + j];
        float *out = row_at(found[r], j, t), shrink = 0;
        for (long u = 0; u < U; u++) {
          const long m = 2 * u + 1 - j;
          shrink -= da[r * M + m] * norm * norm * a[r * M + m] / D;
          add(dq + m * D, da[r * M + m] * norm, row, D);
        }
        for (long d = 0; d < D; d++) out[d] = shrink * row[d];
        for (long u = 0; u < U; u++) {
          const float w = p[r * M + 2 * u + j], s = da[r * M + 2 * u + 1 - j] * norm;
          const float *g = &bank[(2 * u + j) * D], *k = q + (2 * u + 1 - j) * D;
          #pragma omp simd
          for (long d = 0; d < D; d++) out[d] += w * g[d] + s * k[d];
        }
      }
    }
  }
  found.push_back(partial.sum(0).view_as(queries));
  return found;
}
"""


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--states", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp"]
    cpp = load_inline(
        "cpp_prefix", SOURCE, functions=["forward", "backward"], extra_cflags=flags, extra_ldflags=["-fopenmp"]
    )
    torch.manual_seed(0)
    history = [torch.randn(2, 1, arguments.tokens, arguments.width) for _ in range(arguments.states)]
    queries = 0.05 * torch.randn(2, 2, arguments.width)
    given = [torch.randn_like(history[0]) for _ in queries]
    nothing = [torch.zeros(2, 1, arguments.tokens) for _ in queries]

    def in_cpp() -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
        found = cpp.forward(history, queries, EPS)
        return found[:2], lambda: cpp.backward(given, history, queries, *found[2:])

    def in_numba() -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
        found = autograd.prefix.run(history, queries, KEY, VALUE, EPS)
        rest = found[2:4], found[4], found[5], KEY, VALUE
        return found[:2], lambda: autograd.prefix.run_backward(given, nothing, [], history, queries, *rest)

    ways: dict[str, Callable[[], Any]] = {"C++": in_cpp, "numba": in_numba}
    check(in_cpp(), in_numba())
    found: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            _, back = way()
            middle = time.perf_counter()
            back()
            found[name]["forward"].append(1e3 * (middle - began))
            found[name]["backward"].append(1e3 * (time.perf_counter() - middle))
    if arguments.json:
        print(json.dumps(vars(arguments) | {"load": os.getloadavg()[0], "found": found}))
        return
    print(f"{arguments.threads} threads, load {os.getloadavg()[0]:.1f}, milliseconds, median (lowest–highest)")
    rows = [
        [name, *(f"{statistics.median(t):.1f} ({min(t):.1f}–{max(t):.1f})" for t in row.values())]
        for name, row in found.items()
    ]
    print(table(["", "forward", "backward"], rows))


def check(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    """Check that both compute the same."""
    for a, b in zip([*first[0], *first[1]()], [*second[0], *second[1]()], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
