# The trainer. Compose also runs `model` and `agent` from this image. They need the extras "gateway" and "cli".
FROM python:3.11-slim-bookworm AS wheel
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY deploy/requirements deploy/requirements
RUN pip install --no-deps --require-hashes -r deploy/requirements/build.txt
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1
WORKDIR /src
# "cpu" or "cuda": which build of torch.
ARG TORCH=cpu
# The index with the CPU build of torch. If it is empty, pip uses only the indexes that it is configured for.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY deploy/requirements deploy/requirements
# DeepSpeed is published as source. It is built with the tools of build.txt, which are removed afterwards.
RUN python -m venv /venv && cd deploy/requirements \
    && /venv/bin/pip install --no-deps --require-hashes -r build.txt \
    && /venv/bin/pip install --no-deps --no-build-isolation --require-hashes -r trainer.txt \
    && if [ "$TORCH" = cuda ]; then TORCH_INDEX=; fi \
    && /venv/bin/pip install --no-deps --require-hashes \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r "torch-$TORCH.txt" \
    && /venv/bin/pip uninstall -y hatchling wheel
COPY --from=wheel /dist /dist
RUN /venv/bin/pip install --no-deps /dist/*.whl

FROM python:3.11-slim-bookworm
# A new named volume gets the owner of the directory at its mount point, so the service's user owns these.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin weir \
    && install -d -o 10001 -g 10001 /model /etc/weir /var/lib/weir/policies /var/lib/weir/checkpoints
COPY --from=build /venv /venv
COPY deploy/docker/prepare.py /opt/weir/prepare.py
ENV PATH=/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HOME=/tmp WEIR_TRAINER__HOST=0.0.0.0
USER 10001
EXPOSE 8200
CMD ["python", "-m", "trainer_service"]
