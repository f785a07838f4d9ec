# The sidecar with the demo job. Two stages: the first builds wheels and has a compiler, the second
# runs them and has none.
#
# torch: with pip's default index `torch` brings a CUDA build of several gigabytes. For a CPU-only
# image give an index that serves CPU builds:
#   docker build --build-arg PIP_INDEX_URL=... --build-arg PIP_EXTRA_INDEX_URL=... .
ARG PYTHON=3.11.14

FROM python:${PYTHON}-bookworm AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/nutp \
    && /opt/nutp/bin/pip install --no-cache-dir --constraint constraints.txt torch safetensors numpy
COPY pyproject.toml README.md ./
COPY ntp_core ntp_core
COPY sidecar sidecar
COPY alerts/runbooks alerts/runbooks
RUN /opt/nutp/bin/pip install --no-cache-dir --constraint constraints.txt '.[train]'

FROM python:${PYTHON}-slim-bookworm
# The run directory and the folder of secrets belong to the user before volumes are laid over them:
# a new named volume takes owner and mode from here.
RUN groupadd --gid 10001 nutp \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent nutp \
    && install -d -o 10001 -g 10001 -m 0750 /run/nutp
COPY --from=build /opt/nutp /opt/nutp
COPY alerts/alert_log.py /opt/nutp/alert_log.py
ENV PATH=/opt/nutp/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 9440
ENTRYPOINT ["ntp-sidecar"]
CMD ["--help"]
