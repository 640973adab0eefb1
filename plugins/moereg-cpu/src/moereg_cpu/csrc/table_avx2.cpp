#include "kernels.h"

const moereg_cpu::Table moereg_cpu::kAvx2 = table_of("avx2");
