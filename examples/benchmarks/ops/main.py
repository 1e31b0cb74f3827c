"""Speed of the quantize ops beside a read-only pass, torch's own ops and pure torch.

All variants run interleaved in one process, and the best of several runs counts: on a machine
with other work, ratios are to be trusted before absolutes. Run it as

    python examples/benchmarks/ops/main.py --widths 64 256 602 --threads 1 2
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lightning_sylvie import ops
from lightning_sylvie.ops import minmax_reference, rotate_reference

NO_BAD_ROW = 2**63 - 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What no pass over the rows can beat: every line of every row is loaded once, some rows ahead.
READ_ROWS = r"""
#include <stdint.h>
uint64_t read_rows(const char* rows, const int64_t* index, int64_t count, int64_t bytes) {
  uint64_t sum = 0;
  const int64_t ahead = bytes < 512 ? 12 : bytes < 1536 ? 6 : 4;
  for (int64_t k = 0; k < count; ++k) {
    const char* row = rows + index[k] * bytes;
    const char* next = rows + index[k + ahead < count ? k + ahead : count - 1] * bytes;
    for (int64_t j = 0; j + 8 <= bytes; j += 64) {
      __builtin_prefetch(next + j);
      sum += *(const uint64_t*)(row + j);
    }
  }
  return sum;
}
"""


def compile_read_rows(folder: str) -> Callable[[Tensor, Tensor], None]:
    source, library = Path(folder, "read.c"), Path(folder, "read.so")
    source.write_text(READ_ROWS)
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
    function = ctypes.CDLL(str(library)).read_rows
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]

    def read(rows: Tensor, index: Tensor) -> None:
        row_bytes = rows.size(1) * rows.element_size()
        function(rows.data_ptr(), index.data_ptr(), len(index), row_bytes)

    return read


class Workload:
    """Half of the rows, sorted, and a message and output of every kind.

    Args:
        num_rows: Rows of the source; half of them travel.
        width: Values of a row.
        dtype: Their type.
        read: A read-only pass over some rows, on one thread.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        read: Callable[[Tensor, Tensor], None],
    ) -> None:
        self.rows = torch.empty(num_rows, width, dtype=dtype)
        for part in self.rows.split(20000):  # randn of a whole 16-bit tensor needs a float copy
            part.copy_(torch.randn(len(part), width))
        self.index = torch.randperm(num_rows)[: num_rows // 2].sort().values
        self.id, self.bad = self.index.clone(), torch.tensor([NO_BAD_ROW])
        self.output = torch.zeros(len(self.index), width, dtype=dtype)
        self.sums = torch.zeros(num_rows, width, dtype=dtype)
        self.read = read

    def variants(self, bits: list[int]) -> dict[str, Callable[[], object]]:
        """Name and call of all that is compared; messages are filled by the quantize calls."""
        found: dict[str, Callable[[], object]] = {}
        if torch.get_num_threads() == 1:
            found["read-only pass"] = lambda: self.read(self.rows, self.index)
        found["index_select"] = lambda: torch.index_select(
            self.rows, 0, self.index, out=self.output
        )
        for b in bits:
            found.update(self._minmax(b))
        found.update(self._rotated())
        found["fill_"] = lambda: self.output.fill_(1.0)
        found["index_add_"] = lambda: self.sums.index_add_(0, self.index, self.output)
        return found

    def _message(self, row_bytes: int) -> Tensor:
        return torch.zeros(len(self.index), row_bytes, dtype=torch.uint8)

    def _minmax(self, bits: int) -> dict[str, Callable[[], object]]:
        message = self._message(ops.minmax_row_bytes(self.rows.size(1), bits))
        counts = [len(self.index)]
        return {
            f"minmax {bits}: quantize": lambda: ops.quantize_rows(
                self.rows, self.index, self.id, 1, bits, message, 0, self.bad
            ),
            f"minmax {bits}: dequantize": lambda: ops.dequantize_rows(
                message, 0, bits, self.output
            ),
            f"minmax {bits}: add": lambda: ops.dequantize_add_rows(
                message, 0, bits, self.index, counts, self.sums
            ),
        }

    def _rotated(self) -> dict[str, Callable[[], object]]:
        message = self._message(ops.rotated_row_bytes(self.rows.size(1)))
        counts = [len(self.index)]
        return {
            "rotated: quantize": lambda: ops.rotate_quantize_rows(
                self.rows, self.index, self.id, 1, 1, True, message, 0, self.bad
            ),
            "rotated: dequantize": lambda: ops.rotate_dequantize_rows(
                message, 0, self.id, 1, 1, self.output
            ),
            "rotated: add": lambda: ops.rotate_dequantize_add_rows(
                message, 0, self.id, 1, 1, self.index, counts, self.sums
            ),
        }

    def references(self) -> dict[str, Callable[[], object]]:
        """Pure torch and the library's own row-wise quantizers, on a twentieth of the rows."""
        index = self.index[: len(self.index) // 20]
        id, width = index.clone(), self.rows.size(1)
        minmax = self._message(ops.minmax_row_bytes(width, 1))[: len(index)]
        rotated = self._message(ops.rotated_row_bytes(width))[: len(index)]
        output = torch.zeros(len(index), width, dtype=self.rows.dtype)
        selected = self.rows[index].float()
        return {
            "torch minmax 1: quantize": lambda: minmax_reference.quantize_rows(
                self.rows, index, id, 1, 1, minmax, 0, self.bad
            ),
            "torch minmax 1: dequantize": lambda: minmax_reference.dequantize_rows(
                minmax, 0, 1, output
            ),
            "torch rotated: quantize": lambda: rotate_reference.rotate_quantize_rows(
                self.rows, index, id, 1, 1, True, rotated, 0, self.bad
            ),
            "torch rotated: dequantize": lambda: rotate_reference.rotate_dequantize_rows(
                rotated, 0, id, 1, 1, output
            ),
            "embedding_bag_byte_prepack": lambda: torch.ops.quantized.embedding_bag_byte_prepack(
                selected
            ),
            "embedding_bag_4bit_prepack": lambda: torch.ops.quantized.embedding_bag_4bit_prepack(
                selected
            ),
            "embedding_bag_2bit_prepack": lambda: torch.ops.quantized.embedding_bag_2bit_prepack(
                selected
            ),
        }


def best_times(
    variants: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    best = dict.fromkeys(variants, float("inf"))
    for _ in range(repeats):
        for name, run in variants.items():
            start = clock()
            run()
            best[name] = min(best[name], clock() - start)
    return best


RATIOS = [
    ("minmax 1: quantize / read-only pass", "read-only pass", "minmax 1: quantize", 0.7),
    ("minmax 1: quantize / index_select", "index_select", "minmax 1: quantize", 1.3),
    ("minmax 1: dequantize / fill_", "fill_", "minmax 1: dequantize", 1.0),
    ("minmax 1: add / index_add_", "index_add_", "minmax 1: add", 2.0),
    ("rotated / minmax 1: quantize", "minmax 1: quantize", "rotated: quantize", 0.7),
    ("rotated / minmax 1: dequantize", "minmax 1: dequantize", "rotated: dequantize", 0.6),
]


def report(
    workload: Workload, times: dict[str, float], threads: int, share: dict[str, int]
) -> None:
    width, size = workload.rows.size(1), workload.rows.element_size()
    for name, seconds in times.items():
        gigabytes = len(workload.index) * width * size / share.get(name, 1) / 1e9
        print(f"{width:6} {threads:7}  {name:34} {gigabytes / seconds:8.2f} GB/s")
    for name, base, variant, wanted in RATIOS:
        if base in times and variant in times:
            ratio = times[base] / times[variant]
            print(f"{width:6} {threads:7}  ratio {name:38} {ratio:5.2f}  (wanted {wanted})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 602])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, default=400_000, help="half of them travel")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--references", action="store_true", help="slow: pure torch as well")
    parser.add_argument(
        "--clock",
        choices=["cpu", "wall"],
        default="cpu",
        help="cpu: the process's own time divided by its threads, for a machine with other work",
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        read = compile_read_rows(folder)
        for width in options.widths:
            workload = Workload(options.rows, width, DTYPES[options.dtype], read)
            for threads in options.threads:
                torch.set_num_threads(threads)
                clock = (
                    time.perf_counter
                    if options.clock == "wall"
                    else lambda threads=threads: time.process_time() / threads
                )
                times = best_times(workload.variants(options.bits), options.repeats, clock)
                share: dict[str, int] = {}
                if options.references and threads == 1:
                    references = workload.references()
                    times |= best_times(references, 2, clock)
                    share = dict.fromkeys(references, 20)
                report(workload, times, threads, share)


if __name__ == "__main__":
    main()
