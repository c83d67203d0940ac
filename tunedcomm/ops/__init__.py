"""The public functions. Importing this package defines their operators, `torch.ops.tunedcomm.*`."""

from tunedcomm.ops import ag_gemm as ag_gemm
from tunedcomm.ops import all_gather as all_gather
from tunedcomm.ops import all_reduce as all_reduce
from tunedcomm.ops import all_reduce_bias as all_reduce_bias
from tunedcomm.ops import all_reduce_rms_norm as all_reduce_rms_norm
from tunedcomm.ops import all_to_all as all_to_all
from tunedcomm.ops import gemm_ar as gemm_ar
from tunedcomm.ops import gemm_rs as gemm_rs
from tunedcomm.ops import reduce_scatter as reduce_scatter
