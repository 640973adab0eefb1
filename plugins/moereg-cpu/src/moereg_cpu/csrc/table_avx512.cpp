#include "kernels.h"

const moereg_cpu::Table moereg_cpu::kAvx512 = table_of("avx512");
