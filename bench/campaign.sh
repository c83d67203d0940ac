#!/usr/bin/env bash
# Measure on GPUs what tuning_db/ and bench/results/ hold, in stages that each end in minutes.
#
#   bench/campaign.sh DIRECTORY STAGE...      databases, CSVs and logs go to DIRECTORY, which may hold earlier ones
#
# Stages: tune_OP bench_OP stress_OP with OP any op; bodies_OP models_OP half_OP with OP one of ag_gemm, gemm_rs,
# gemm_ar; hot_path large norms forms experts autotune regret bodies bench_all llama fsdp; stress (of all collectives),
# replays (of graphs of them); under MPS with N=1 PER_GPU=2 concurrent (grids of at most 16 blocks), savings. N is the
# number of GPUs (4).
# With PER_GPU=2 two ranks share each, which shows whether N*2 ranks are right where fewer GPUs are at hand, and no times
# worth keeping. A stage that fails or runs over its time is said and the next one begins. NVLink multicast stays off:
# creating a multicast object has taken shared hosts out of service.
set -uo pipefail
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TUNEDCOMM_MISS_LOG=0 TUNEDCOMM_PEER_TIMEOUT_S=${TUNEDCOMM_PEER_TIMEOUT_S:-5}
cd "$(dirname "$0")/.." || exit
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
N=${N:-4} PER_GPU=${PER_GPU:-1}
if ((PER_GPU > 1)); then # NCCL lets ranks of different hosts alone share a GPU
  export PER_GPU TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1
fi
DIR=$(mkdir -p "$1" && cd "$1" && pwd) || exit
shift

# Large products of the measured peers, Llama-3 70B at tensor parallelism 4, and decode.
RS=4096x8192x3584,8192x8192x3584,8192x8192x8192,2048x7168x8192,2048x8192x7168,4096x8192x7168,8192x8192x7168,16384x8192x7168,2048x8192x2048,4096x8192x2048,8192x8192x2048,16384x8192x2048
AG=4096x3584x8192,8192x3584x8192,4096x7168x8192,8192x7168x8192,8192x8192x8192,2048x8192x7168,2048x14336x8192,4096x14336x8192,8192x14336x8192,16384x14336x8192,2048x2560x8192,4096x2560x8192,8192x2560x8192,16384x2560x8192
AR=2048x8192x7168,4096x8192x7168,8192x8192x7168,2048x8192x2048,4096x8192x2048,8192x8192x2048
RS_DECODE=4x8192x2048,16x8192x2048,64x8192x2048,256x8192x2048,16x8192x7168,64x8192x7168,256x8192x7168
AG_DECODE=4x2560x8192,16x2560x8192,64x2560x8192,256x2560x8192,16x14336x8192,64x14336x8192
AR_DECODE=1x8192x2048,8x8192x2048,16x8192x2048,64x8192x2048,128x8192x2048,256x8192x2048,1x8192x7168,8x8192x7168,64x8192x7168,256x8192x7168

say() { echo "== $(date +%T) $*"; }
limited() { # SECONDS LOG COMMAND...: the end of the log is shown where it fails
  local seconds=$1 log=$DIR/$2.log; shift 2
  timeout -k 5 "$seconds" "$@" >>"$log" 2>&1
  local rc=$?
  if ((rc)); then say "rc $rc: $*"; tail -n 25 "$log"; fi
  return $rc
}
ranks() { # SECONDS LOG SCRIPT...
  local seconds=$1 log=$2; shift 2
  if ((PER_GPU > 1)); then
    # shellcheck disable=SC2016
    set -- --no-python bash -c 'export NCCL_HOSTID=$RANK LOCAL_RANK=$((LOCAL_RANK / PER_GPU)); exec python3 "$@"' _ "$@"
  fi
  limited "$seconds" "$log" torchrun --standalone --nproc-per-node $((N * PER_GPU)) "$@"
}
tunedcomm() { limited "$1" "$2" python3 -m tunedcomm.cli.main "${@:3}"; }
settle() { # one file a database: nothing left in a log beside it
  python3 -c "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('pragma journal_mode=delete')" "$DIR/tuned.db"
  rm -f "$DIR"/tuned.db.studies.*
}
tune() { tunedcomm "$1" "$2" tune "${@:3}" --db "$DIR/tuned.db"; settle; }
bench() { TUNEDCOMM_DB=$DIR/tuned.db tunedcomm "$1" "$2" bench "${@:3}" --csv "$DIR/bench.csv"; }
bodies() { # SECONDS MODULE NAMES
  ranks "$1" "$2" tests/gpu/run_bodies.py "$2" "$3"
  grep -h '^OK' "$DIR/$2.log"
}

hot_path() { for _ in 1 2; do ranks 60 hot_path bench/eager_cost.py --csv "$DIR/eager.csv"; done; }
large() {
  tune 60 large --op all_reduce --shape 33554432,67108864,134217728 --variants two_shot,two_shot_split --budget 40s
  bench 60 large --op all_reduce --shape 16777216,33554432,67108864,134217728
}
norms() {
  tune 60 norms --op all_reduce_rms_norm --shape 512x8192,1024x8192,2048x8192,4096x8192 --budget 45s
  bench 60 norms --op all_reduce_rms_norm --shape 1x8192,8x8192,64x8192,128x8192,512x8192,1024x8192,2048x8192,4096x8192
}
forms() { # of norms that quantise; each at the sizes of `norms`, and 5120 wide
  local shapes scaling; shapes=$(printf '%sx8192,' 1 8 64 128 512 1024 2048 4096; printf '%sx5120,' 1 64 512 4096)
  tune 300 forms --op all_reduce_rms_norm --scaling token,group128 --shape "${shapes%,}" --budget 240s
  for scaling in token group128; do bench 90 forms --op all_reduce_rms_norm --scaling "$scaling" --shape "${shapes%,}"; done
}
experts() { # decode in the layout of fixed shapes, prefill sorted by expert
  local op layout shapes few=1x7168x8x256,16x7168x8x256,64x7168x8x64,64x7168x8x256,128x7168x8x256,128x4096x8x128
  for op in ep_dispatch ep_combine; do
    for layout in padded contiguous; do
      if [[ $layout == padded ]]; then shapes=$few; else shapes=1024x7168x8x256,4096x7168x8x256,4096x4096x8x128; fi
      [[ $op == ep_combine ]] || set -- --layout $layout
      tune 150 experts --op $op "$@" --shape $shapes --budget "${BUDGET:-75s}"
      bench 90 experts --op $op "$@" --shape $shapes
      TUNEDCOMM_DB=$DIR/tuned.db tunedcomm 90 experts bench --op $op "$@" --shape $shapes --skew \
        --contender tuned,library --csv "$DIR/skew.csv"
      set --
    done
  done
}
regret() {
  tunedcomm 200 regret tune --op all_reduce --db "$DIR/base.db"
  cp "$DIR/base.db" "$DIR/odd.db"
  tunedcomm 300 regret tune --op all_reduce --shape "$(python3 bench/regret.py sizes)" --db "$DIR/odd.db"
  ranks 200 regret bench/regret.py measure --base "$DIR/base.db" --tuned "$DIR/odd.db" --csv "$DIR/regret.csv"
}

gemm_bodies() {
  GEMM_OP=$1 bodies 200 gemm_bodies "${2:-calls,kept,variants,chain}"
  ranks 100 "stress_$1" bench/stress.py --op "$1" --launches 200 --seconds 60 --hang-s 95
}
stress() { # LOG SECONDS OPTION...: --op where not all collectives are meant
  ranks $(($2 + 150)) "$1" bench/stress.py --launches "${STRESS:-10000}" --seconds "$2" --hang-s $(($2 + 140)) --csv "$DIR/stress.csv" "${@:3}"
  grep -h ' launches, ' "$DIR/$1.log"
}
under_mps() { # MPS lets the ranks of a GPU run at once; a server of its own, for a rank that died may leave one unusable
  local rc=0 mps; mps=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$mps CUDA_MPS_LOG_DIRECTORY=$mps
  timeout 20 nvidia-cuda-mps-control -d
  "$@" || rc=$?
  echo quit | timeout 20 nvidia-cuda-mps-control
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  return $rc
}
concurrent() {
  local seconds=${RUN_S:-90}
  under_mps ranks $((seconds + 200)) concurrent bench/stress.py --concurrent --launches 1000000000 --seconds "$seconds" \
    --hang-s $((seconds + 190)) --csv "$DIR/concurrent.csv"
  grep -h ' launches' "$DIR/concurrent.log"
}
savings() {
  under_mps ranks 400 savings bench/fused_savings.py --csv "$DIR/savings.csv"
  grep -h ' us ' "$DIR/savings.log"
}
tune_gemm() { # OP LARGE DECODE
  tune 300 "tune_$1" --op "$1" --shape "$2" --budget 200s
  tune 160 "tune_$1" --op "$1" --shape "$3" --budget 80s
  tune 120 "tune_$1" --op "$1" --dtype float8_e4m3fn --shape 4096x8192x3584,8192x8192x8192 --budget 60s
}
half() { # OP LARGE: fp16 behaves as bf16 does; some shapes of it
  local shapes; shapes=$(cut -d, -f1-3 <<<"$2")
  tune 120 "half_$1" --op "$1" --dtype float16 --shape "$shapes" --budget 60s
  bench 60 "half_$1" --op "$1" --dtype float16 --shape "$shapes" --contender tuned,library,torch_fused,cublas
}
MODELS=llama3-8b,llama3-70b,llama3-405b,qwen3-32b,gpt-oss-120b,deepseek-v3
models() { # OP: one after the other until the time is over; the same call goes on where it stopped
  tune 580 "models_$1" --op "$1" --model $MODELS --tp "$N" --tokens "${TOKENS:-4,16,64,256,1024,4096,16384}" --budget "${BUDGET:-300s}"
}
bench_gemm() { # OP LARGE DECODE
  local peers=tuned,library,torch_fused,cublas
  bench 200 "bench_$1" --op "$1" --shape "$2" --contender $peers
  bench 100 "bench_$1" --op "$1" --shape "$3" --contender $peers
  bench 60 "bench_$1" --op "$1" --dtype float8_e4m3fn --shape 4096x8192x3584,8192x8192x8192 --contender $peers
}
bodies_of_all() {
  bodies 200 bodies variants,chain,streams,symmetric
  bodies 60 bodies dispatch,current_device,stream_order
  if ((N * PER_GPU == 4)); then TUNEDCOMM_NODE_OF_RANK=0,0,1,1 bodies 60 bodies nodes,dispatch; fi
}
bench_all() {
  local op
  for op in all_reduce all_gather reduce_scatter all_to_all all_reduce_bias all_reduce_rms_norm; do bench 90 bench_all --op $op; done
}

for stage in "$@"; do
  say "$stage"
  case $stage in
    stress_*) stress "$stage" 300 --op "${stage#*_}" ;;
    *_gemm_* | *_ag_gemm)
      op=${stage#*_}
      case $op in gemm_rs) shapes=("$RS" "$RS_DECODE") ;; ag_gemm) shapes=("$AG" "$AG_DECODE") ;; gemm_ar) shapes=("$AR" "$AR_DECODE") ;;
        *) say "no such op: $op"; exit 2 ;; esac
      case $stage in bodies_*) gemm_bodies "$op" ;; tune_*) tune_gemm "$op" "${shapes[@]}" ;; models_*) models "$op" ;;
        half_*) half "$op" "${shapes[0]}" ;; bench_*) bench_gemm "$op" "${shapes[@]}" ;; *) say "no such stage: $stage"; exit 2 ;; esac ;;
    tune_*) tune 160 "$stage" --op "${stage#*_}" --budget "${BUDGET:-120s}" ;;
    bench_all) bench_all ;;
    bench_*) bench 90 "$stage" --op "${stage#*_}" ;;
    bodies) bodies_of_all ;;
    stress) stress stress 300 ;;
    replays) stress replays 200 --graph ;;
    llama) ranks 300 llama bench/llama_tp.py --csv "$DIR/llama.csv" ;;
    fsdp) ranks 200 fsdp bench/fsdp_step.py --csv "$DIR/fsdp.csv" ;;
    autotune) ranks 200 autotune bench/autotune.py --budget 3 --csv "$DIR/autotune.csv" ;;
    hot_path | large | norms | forms | experts | regret | concurrent | savings) $stage ;;
    *) say "no such stage: $stage"; exit 2 ;;
  esac
done
say end
