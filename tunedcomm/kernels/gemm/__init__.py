"""The fused GEMMs: ag_gemm, gemm_rs and gemm_ar."""
