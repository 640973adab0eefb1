#include "kernels.h"

const moereg_cpu::Table moereg_cpu::kPortable = table_of("portable");
