# syntax=docker/dockerfile:1
# EPD as an image, for a CPU or for CUDA:
#   docker build -t epd:0.1.0-cpu .
#   docker build -t epd:0.1.0-cuda --build-arg VARIANT=cuda --build-arg BASE=YOUR_CUDA_DEVEL_IMAGE .
#   docker build -t epd-etcd:0.1.0 --target etcd .
# BASE: Debian or Ubuntu with Python 3.11 or later and, for CUDA, the toolkit's compiler, which flash-attn is built with
# when it has no wheel for the versions at hand. The driver comes from the node.
ARG BASE=python:3.11-slim-bookworm
ARG ETCD_BASE=debian:bookworm-slim

FROM ${BASE} AS build
ARG VARIANT=cpu
WORKDIR /build
COPY scripts/image-build scripts/image-build
RUN scripts/image-build compiler
COPY . source
# For VARIANT=cpu: an index with torch's builds for CPUs alone, which are gigabytes smaller.
ARG TORCH_CPU_INDEX=
RUN scripts/image-build install /build/source /opt/epd "${VARIANT}"

FROM ${ETCD_BASE} AS etcd
LABEL org.opencontainers.image.title="epd-etcd" \
      org.opencontainers.image.description="etcd, through which Mooncake's masters choose a leader" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends etcd-server \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --no-create-home --shell /usr/sbin/nologin epd \
    && install -d -o 1000 -g 1000 /var/lib/etcd
USER 1000:1000
WORKDIR /var/lib/etcd
EXPOSE 2379 2380
ENTRYPOINT ["etcd"]

# The last one, and so the default.
FROM ${BASE} AS epd
ARG VARIANT=cpu
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="epd" \
      org.opencontainers.image.description="Multimodal embedding models on Ray Serve, encode and prefill scaled apart" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      epd.variant="${VARIANT}"
COPY scripts/image-build scripts/system-libraries /tmp/scripts/
RUN /tmp/scripts/image-build runtime && rm -r /tmp/scripts
COPY --from=build /opt/epd /opt/epd
COPY scripts/drain-node /usr/local/bin/epd-drain-node
ENV PATH=/opt/epd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_worker_niceness=0 \
    RAY_USAGE_STATS_ENABLED=0
USER 1000:1000
# Not the repository's root, nor anywhere with a folder named like one of its rooms: Ray's workers inherit it.
WORKDIR /home/epd
EXPOSE 8000 8265 6379 8080
CMD ["serve", "run", "/opt/epd/configs/epd.yaml"]
