# An image with the GPU packages of requirements/gpu.txt, Transformer Engine, Apex and megatron_rl, for Linux x86-64.
# NOT BUILT BY ANYBODY YET. When you have built it, write here when, and what had to be changed.
#
#   docker build -t megatron_rl .
#
# Apex refuses an nvcc whose CUDA version, minor part included, is not that of torch, and torch 2.13.0 brings CUDA 13.0.
# So the base is the newest release of NVIDIA's image with CUDA 13.0: users of 25.11 report nvcc 13.0 and Python 3.12.3,
# and NVIDIA's release notes say that 25.12 has CUDA 13.1.0 and Python 3.12. The release notes of 25.11 were not read.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE}

# The image's own torch stays unused: the packages go into a virtual environment. /etc/pip/constraint.txt of the image
# fixes versions for the image's torch, and LD_LIBRARY_PATH names that torch's libraries first; both would break ours.
# The image lets fp32 matrix products use TF32; our comparisons of log-probs need fp32.
ENV PIP_CONSTRAINT="" \
    LD_LIBRARY_PATH=/usr/local/cuda/compat/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:${PATH}
RUN apt-get update && apt-get install --yes --no-install-recommends git python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv

# torch comes first, because Transformer Engine and Apex compile against the torch that is installed.
WORKDIR /opt/megatron_rl
COPY requirements/gpu.txt requirements/gpu.txt
RUN pip install --no-cache-dir "$(grep '^torch==' requirements/gpu.txt)" "setuptools>=78.1.1,<81" wheel ninja packaging pybind11

# No GPU is visible while an image is built, so the architecture is named: 9.0 is that of H100 and H200.
# transformer_engine_torch is a source distribution. It includes cudnn.h, which torch's own cuDNN package has.
ARG CUDA_ARCHITECTURES=9.0
ARG MAX_JOBS=8
RUN CPATH="$(python -c 'import nvidia.cudnn; print(list(nvidia.cudnn.__path__)[0])')/include" \
    TORCH_CUDA_ARCH_LIST=${CUDA_ARCHITECTURES} NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS} \
    pip install --no-cache-dir --no-build-isolation -r requirements/gpu.txt

ARG APEX=26.09
RUN git clone --depth 1 --branch ${APEX} https://github.com/NVIDIA/apex /tmp/apex \
    && TORCH_CUDA_ARCH_LIST=${CUDA_ARCHITECTURES} MAX_JOBS=${MAX_JOBS} \
    pip install --no-cache-dir --no-build-isolation --config-settings "--build-option=--cpp_ext" \
    --config-settings "--build-option=--cuda_ext" /tmp/apex \
    && rm -rf /tmp/apex

COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
