"""The op ag_gemm and its variants."""
