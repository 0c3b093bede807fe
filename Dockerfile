# An image with the GPU packages of requirements/gpu.lock and megatron_rl, for Linux x86-64. Its steps are the parts of
# tools/gpu_env.sh, which have run on a machine without a GPU. THE IMAGE HAS NOT BEEN BUILT BY ANYBODY YET. When you have
# built it, write here when, and what had to be changed.
#
#   docker build -t megatron_rl .
#
# The base brings the libraries of InfiniBand and RoCE, a C++ compiler and Python 3.12 (users of 25.11 report 3.12.3; its
# release notes were not read). CUDA itself comes from the packages.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE}

# The image's own torch stays unused: the packages go into a virtual environment. /etc/pip/constraint.txt of the image
# fixes versions for the image's torch, and LD_LIBRARY_PATH names that torch's libraries first; both would break ours.
# The image lets fp32 matrix products use TF32; our comparisons of log-probs need fp32.
ENV PIP_CONSTRAINT="" \
    PIP_NO_CACHE_DIR=1 \
    LD_LIBRARY_PATH=/usr/local/cuda/compat/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0 \
    VENV=/opt/venv \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:${PATH}
RUN apt-get update && apt-get install --yes --no-install-recommends git python3-venv && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megatron_rl
COPY requirements/gpu.lock requirements/gpu.lock
COPY tools/gpu_env.sh tools/gpu_env.sh
ARG MAX_JOBS=8
RUN tools/gpu_env.sh environment torch packages
RUN tools/gpu_env.sh extension

COPY . .
RUN tools/gpu_env.sh project check
