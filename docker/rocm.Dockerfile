# SGLang's ROCm image with inkling-rocm inside. Its torch, triton, aiter and sglang stay what they are: install.sh
# stops the build if any of its Python packages changes. MI300X, MI325X and MI355X (gfx942, gfx950).
# Build from the repository's root:  docker build -f docker/rocm.Dockerfile -t inkling-rocm .
ARG SGLANG_VERSION=0.5.23
ARG ROCM_TAG=rocm720
ARG BASE_IMAGE=lmsysorg/sglang:v${SGLANG_VERSION}-${ROCM_TAG}
FROM ${BASE_IMAGE}

ARG SGLANG_VERSION
ARG USER_ID=10001
USER 0
WORKDIR /opt/inkling-rocm
COPY pyproject.toml README.md LICENSE ./
COPY kernel_base kernel_base
COPY inkling_rocm inkling_rocm
COPY triton_attn triton_attn
COPY moe_aiter moe_aiter
COPY gcn_emulator gcn_emulator
COPY docker docker
RUN bash docker/install.sh . "${SGLANG_VERSION}" \
    && useradd --create-home --uid "${USER_ID}" inkling

# What SGLang's recipe for Inkling on AMD sets.
ENV SGLANG_USE_AITER=1 \
    SGLANG_ENABLE_UNIFIED_RADIX_TREE=1 \
    PORT=30000

USER ${USER_ID}
ENV HOME=/home/inkling
WORKDIR /home/inkling
# As the user that will serve: fails here rather than at start when the base image keeps its Python to root.
RUN python3 -c "import torch, triton" && inkling-rocm --help

EXPOSE 30000
HEALTHCHECK --interval=30s --timeout=10s --start-period=60m --retries=3 \
    CMD ["python3", "/opt/inkling-rocm/docker/healthcheck.py"]
ENTRYPOINT ["/bin/bash", "/opt/inkling-rocm/docker/entrypoint.sh"]
