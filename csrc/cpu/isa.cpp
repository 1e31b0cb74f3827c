// Which instruction set this processor has.
#include <cstdlib>
#include <cstring>
#include <utility>

#include "checks.h"
#include "cpu/kernels.h"

namespace sylvie {
namespace {

bool has(Isa isa) {
#if defined(__x86_64__)
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  switch (isa) {
    case Isa::kAvx512:
      return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case Isa::kAvx2:
      return has_avx2;
    case Isa::kScalar:
      break;
  }
#endif
  return isa == Isa::kScalar;
}

Isa named(const char* name) {
  for (const auto& [known, isa] : {std::pair{"scalar", Isa::kScalar}, {"avx2", Isa::kAvx2}, {"avx512", Isa::kAvx512}}) {
    if (std::strcmp(name, known) == 0) {
      SYLVIE_CHECK(has(isa), "SYLVIE_ISA: this processor has no ", name);
      return isa;
    }
  }
  SYLVIE_CHECK(false, "SYLVIE_ISA: expected scalar, avx2 or avx512, got ", name);
}

}  // namespace

Isa chosen_isa() {
  static const Isa best = has(Isa::kAvx512) ? Isa::kAvx512 : has(Isa::kAvx2) ? Isa::kAvx2 : Isa::kScalar;
  const char* const name = std::getenv("SYLVIE_ISA");
  return name == nullptr ? best : named(name);
}

}  // namespace sylvie
