"""SonicMoE for moereg: grouped products of 16-bit rows on Hopper, written in CuTe DSL."""
