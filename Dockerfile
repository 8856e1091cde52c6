# Images of a site and of a server: docker build --target site -t veilboost-site .   (jobs/CONTAINERS.md)
#
# Nothing secret goes in: startup kit, data and all that a site keeps are mounted. The root file system may be read-only.

# hadolint global ignore=DL3008
FROM debian:bookworm-slim AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 ca-certificates libgomp1 tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 veilboost \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin veilboost \
    && install -d -o 10001 -g 10001 -m 0700 /workspace /kept /tmp/nvflare \
    && install -d -o 10001 -g 10001 -m 0755 /metrics \
    && install -d /kit /data

# The compiler stays in this stage. The lock file of the demo names every package with its version; NCCL, which XGBoost's
# wheel asks for and loads on several GPUs alone, is left out. The check fails where a native module was not made.
FROM base AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY .ci/demo.lock .ci/check_wheel.py ./.ci/
RUN python3 -m venv /opt/veilboost \
    && /opt/veilboost/bin/pip install --no-cache-dir --upgrade "pip>=25" \
    && grep -v nvidia-nccl .ci/demo.lock > packages.txt \
    && /opt/veilboost/bin/pip install --no-cache-dir --no-deps -r packages.txt
COPY pyproject.toml README.md LICENSE ./
COPY he_processors ./he_processors
COPY dp_components ./dp_components
COPY nvflare_plugins ./nvflare_plugins
RUN /opt/veilboost/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/veilboost/bin/python .ci/check_wheel.py

FROM base AS runtime
COPY --from=build /opt/veilboost /opt/veilboost
COPY poc_workspace/containers/start poc_workspace/containers/health.py /opt/veilboost/
ENV PATH=/opt/veilboost/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    NVFL_WORKSPACE=/workspace
USER 10001:10001
WORKDIR /workspace
VOLUME ["/workspace"]
ENTRYPOINT ["tini", "--", "/opt/veilboost/start"]
CMD ["flare"]
HEALTHCHECK --interval=30s --timeout=10s --start-period=90s --retries=3 \
    CMD ["python3", "-I", "/opt/veilboost/health.py"]

# A site: results, registry and ledgers in /kept, data below /data (read-only).
FROM runtime AS site
VOLUME ["/kept"]

# The server: FLARE keeps jobs and their results in /tmp/nvflare.
FROM runtime AS server
VOLUME ["/tmp/nvflare"]
EXPOSE 8002
