#include "kernels.h"

const moereg_cpu::Table moereg_cpu::kAvx512Bf16 = table_of("avx512_bf16");
