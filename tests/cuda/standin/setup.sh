#!/usr/bin/env bash
# torch's own CUDA build over an imitation of the CUDA runtime and driver: what a program asks of CUDA, without a GPU.
# setup.sh DIR: downloads 2.5 GB into DIR (6.5 GB while it works, 4 GB after) and prints what to export.
# Needs CPython 3.11 on x86-64 Linux, g++, pip and unzip.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$dir"
if [ ! -e site/.ready ]; then
  mkdir -p wheels site
  env -u PIP_EXTRA_INDEX_URL "${PYTHON:-python3.11}" -m pip download -q --no-deps --only-binary=:all: -d wheels \
    torch==2.11.0 triton==3.6.0 cuda-toolkit==13.0.2 nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 \
    nvidia-cuda-cupti==13.0.85 nvidia-cuda-nvrtc==13.0.88 nvidia-cublas==13.1.0.3 nvidia-cudnn-cu13==9.19.0.56 \
    nvidia-cufft==12.0.0.61 nvidia-cufile==1.15.1.6 nvidia-curand==10.4.0.35 nvidia-cusolver==12.0.4.66 \
    nvidia-cusparse==12.6.3.3 nvidia-cusparselt-cu13==0.8.0 nvidia-nccl-cu13==2.28.9 nvidia-nvjitlink==13.0.88 \
    nvidia-nvshmem-cu13==3.4.5 nvidia-nvtx==13.0.85
  for wheel in wheels/*.whl; do unzip -qo "$wheel" -d site; done
  rm -r wheels
  lib=site/nvidia/cu13/lib
  [ -e $lib/libcudart.real ] || mv $lib/libcudart.so.13 $lib/libcudart.real
  ln -sf "$dir/libfakecuda.so" $lib/libcudart.so.13
  touch site/.ready
fi
g++ -O1 -g -std=c++17 -fPIC -shared -fvisibility=default -Isite/nvidia/cu13/include \
  "$here/fake_cuda.cpp" "$here/driver_stubs.cpp" -o libfakecuda.so \
  -Wl,--version-script="$here/runtime.map" -Wl,-soname,libcudart.so.13 -lpthread
# Their own names: beside them the real libraries are loaded for what these lack.
gcc -O1 -fPIC -shared "$here/fake_blas.c" -o libfakeblas.so -Wl,--version-script="$here/blas.map"
gcc -O1 -fPIC -shared "$here/fake_blaslt.c" -o libfakeblaslt.so -Wl,--version-script="$here/blaslt.map"
ln -sf libfakecuda.so libcuda.so.1
# cuDNN asks for more of a driver than there is here. torch imports what is registered like this, and so does without it.
mkdir -p site/standin-1.dist-info
printf '[torch.backends]\nstandin = standin_without_cudnn:begin\n' > site/standin-1.dist-info/entry_points.txt
printf 'Metadata-Version: 2.1\nName: standin\nVersion: 1\n' > site/standin-1.dist-info/METADATA
printf 'def begin():\n    import torch\n\n    torch.backends.cudnn.enabled = False\n    torch.backends.cuda.enable_cudnn_sdp(False)\n' > site/standin_without_cudnn.py
echo "export PYTHONPATH=$dir/site LD_LIBRARY_PATH=$dir LD_PRELOAD=\"$dir/libfakeblas.so $dir/libfakeblaslt.so\" OMP_NUM_THREADS=1"
