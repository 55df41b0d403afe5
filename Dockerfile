# Images of myxa, as `myxa render` names them:
#   docker build -t myxa .                       CPUs
#   docker build --target cuda -t myxa:cuda .    NVIDIA GPUs: SGLang and Megatron-core; docker run --gpus all --shm-size 8g
# --build-arg PIP_EXTRA_INDEX_URL=... names another index, such as one of CPU builds of torch (some gigabytes less).
# Processes are root's: they read keys and write run folders of whatever user mounted them.

FROM python:3.12-slim AS wheel
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# The toolkit's compiler is for kernels that SGLang builds when it starts. Versions are those that SGLang pins.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap build-essential libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/myxa
ENV PATH=/opt/myxa/bin:$PATH
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[gpu,megatron,sglang,math,parquet,tensorboard,agents,code]"
WORKDIR /work
CMD ["myxa", "--help"]

FROM python:3.12-slim AS cpu
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir -c /constraints.txt "$(echo /wheels/*.whl)[cpu,math,parquet,tensorboard,agents,code]"
WORKDIR /work
CMD ["myxa", "--help"]
